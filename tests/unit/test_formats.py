"""What is not text is refused with its name and a way out; a few odd characters are told of."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import marshal
import pickle
import sqlite3
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import zstandard
from safetensors.numpy import save as save_tensors

from peers.data.formats import guess_format
from peers.data.sources import load_documents
from peers.data.text_file import FEW, MOST_ODD_SHARE, NotText, read_text, too_odd
from protocol.errors import UserError

TEXT = "The strip is narrow, and each stage writes into it. " * 60
FRENCH = "Chaque étape écrit, à son tour, là où la bande étroite a été tracée. " * 40
RUSSIAN = "Каждый этап пишет в узкую полосу, и полоса остаётся узкой. " * 40
NOISE = np.random.default_rng(3).bytes(4096)


def zipped() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("a.txt", TEXT)
    return buffer.getvalue()


def tarred() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as file:
        member = tarfile.TarInfo("a.txt")
        member.size = len(TEXT)
        file.addfile(member, io.BytesIO(TEXT.encode()))
    return buffer.getvalue()


def database() -> bytes:
    connection = sqlite3.connect(":memory:")
    connection.execute("create table texts (text)")
    connection.commit()
    return connection.serialize()


def saved_array() -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.arange(99))
    return buffer.getvalue()


NOT_TEXT: dict[str, tuple[Callable[[], bytes], str, str]] = {
    "gzip": (lambda: gzip.compress(TEXT.encode()), "a gzip archive", "gunzip"),
    "bzip2": (lambda: bz2.compress(TEXT.encode()), "a bzip2 archive", "bunzip2"),
    "xz": (lambda: lzma.compress(TEXT.encode()), "an xz archive", "unxz"),
    "zstd": (lambda: zstandard.compress(TEXT.encode()), "a zstd archive", "unzstd"),
    "zip": (zipped, "a zip archive", "unzip"),
    "tar": (tarred, "a tar archive", "tar xf"),
    "sqlite": (database, "an SQLite database", "JSON lines"),
    "parquet": (lambda: b"PAR1\x15\x04\x15\x00" + NOISE + b"PAR1", "a parquet file", "JSON lines"),
    "arrow": (lambda: b"ARROW1\x00\x00" + NOISE, "an Arrow file", "JSON lines"),
    "pdf": (lambda: b"%PDF-1.7\nplain so far\n", "a PDF document", "pdftotext"),
    "png": (lambda: b"\x89PNG\r\n\x1a\n" + NOISE, "an image", "take it out"),
    "jpeg": (lambda: b"\xff\xd8\xff\xe0" + NOISE, "an image", "take it out"),
    "gif": (lambda: b"GIF89a" + NOISE, "an image", "take it out"),
    "a program": (lambda: Path(sys.executable).read_bytes(), "a compiled program", "take it out"),
    "bytecode": (lambda: marshal.dumps(compile(Path(__file__).read_text(), "x", "exec")), "binary data", "take it out"),
    "pickle": (lambda: pickle.dumps(list(range(999)), 4), "a Python pickle", "take it out"),
    "numpy": (saved_array, "a numpy array", "take it out"),
    "safetensors": (lambda: save_tensors({"a": np.arange(99)}), "binary data", "take it out"),
    "noise": (lambda: NOISE, "binary data", "take it out"),
    "NUL bytes": (lambda: TEXT.encode().replace(b" ", b"\0"), "binary data", "take it out"),
    "UTF-16": (lambda: TEXT.encode("utf-16"), "UTF-16 text", "iconv -f UTF-16 -t UTF-8"),
    "UTF-16 without its mark": (lambda: TEXT.encode("utf-16-be"), "UTF-16 text", "iconv -f UTF-16"),
    "UTF-32": (lambda: TEXT.encode("utf-32"), "UTF-32 text", "iconv -f UTF-32"),
    "Latin-1": (lambda: FRENCH.encode("latin-1"), "such as Latin-1", "iconv -f WINDOWS-1252"),
    "Windows-1251": (lambda: RUSSIAN.encode("cp1251"), "such as Windows-1251", "iconv -f ENCODING"),
    "Shift-JIS": (lambda: ("狭い帯を越えて。" * 99).encode("shift-jis"), "GB18030 or Shift-JIS", "iconv -f ENCODING"),
}


@pytest.mark.parametrize("kind", NOT_TEXT)
@pytest.mark.parametrize("source", ["text", "jsonl"])
def test_what_is_not_text_is_refused(tmp_path: Path, kind: str, source: str) -> None:
    made, name, remedy = NOT_TEXT[kind]
    file = tmp_path / "it's text.txt"
    file.write_bytes(made())
    with pytest.raises(UserError) as caught:
        load_documents(source, file)
    message = str(caught.value)
    assert message.startswith(f"expected UTF-8 text in {file}, but it seems to be ") and name in message
    assert remedy in message.rsplit("; ", 1)[1]


@pytest.mark.parametrize(
    "text",
    [
        TEXT,
        FRENCH,
        RUSSIAN,
        "狭い帯を越えて。" * 99,
        "MZ is how it begins",
        "BZh",
        "ORC",
        "II*",
        "tab\tpage\f\x1b[1m\x08",
    ],
)
def test_text_is_text(tmp_path: Path, text: str) -> None:
    file = tmp_path / "a.txt"
    for raw in (text.encode(), text.encode("utf-8-sig")):
        file.write_bytes(raw)
        told: list[str] = []
        assert load_documents("text", file, say=told.append) == [text]
        assert len(told) == 1 and "warning" not in told[0]


@pytest.mark.parametrize(
    "raw", [b"a\r\nb\rc\n\r\n", b"\xef\xbb\xbfa\xef\xbb\xbfb", b"a\xe2\x82", b"\xff a \x80\xe2\x82b"]
)
def test_text_is_read_as_python_reads_it(tmp_path: Path, raw: bytes) -> None:
    """The runs that were begun before keep their data to the byte."""
    file = tmp_path / "a.txt"
    file.write_bytes(raw)
    assert read_text(file).text == file.read_text(encoding="utf-8-sig", errors="replace")


@pytest.mark.parametrize(("odd", "refused"), [(1, False), (9, False), (11, True), (400, True)])
def test_the_line_between_accidents_and_another_encoding(tmp_path: Path, odd: int, refused: bool) -> None:
    characters = 10_000
    raw = b"\xe9" * odd + b"x" * (characters - odd)
    file = tmp_path / "a.txt"
    file.write_bytes(raw)
    told: list[str] = []
    if refused:
        with pytest.raises(UserError, match=rf"{odd} of 10,000 characters \({odd / 100:.2g} %\) are not text"):
            load_documents("text", file)
    else:
        assert load_documents("text", file, say=told.append)[0].count("\ufffd") == odd
        assert f"warning: {odd} of 10,000 characters ({odd / 100:.2g} %) are not text" in told[1]
        assert str(file) in told[1]


def test_many_small_files_in_another_encoding_are_refused_together(tmp_path: Path) -> None:
    """Each has as few odd characters as an accident leaves behind."""
    for number in range(50):
        (tmp_path / f"{number}.txt").write_bytes(b"caf\xe9 " * FEW + TEXT.encode()[:1000])
    assert not read_text(tmp_path / "7.txt").text.endswith("\ufffd")
    with pytest.raises(UserError, match=r"150 of .* of all files.*iconv"):
        load_documents("text", tmp_path)


def test_a_character_that_somebody_else_replaced_is_not_ours_to_count(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("\ufffd" * 50, encoding="utf-8")
    assert read_text(file).odd == 0


def test_all_files_that_are_not_text_are_counted(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt", "c.txt"):
        (tmp_path / name).write_bytes(gzip.compress(TEXT.encode()))
    (tmp_path / "d.txt").write_text(TEXT)
    with pytest.raises(
        UserError, match=r"a\.txt, but it seems to be a gzip.*\(2 more of the files are not text\); gunzip"
    ):
        load_documents("text", tmp_path)


def test_the_share() -> None:
    assert not too_odd(FEW, 1) and too_odd(FEW + 1, 1)
    assert not too_odd(1000, round(1000 / MOST_ODD_SHARE)) and too_odd(1001, round(1000 / MOST_ODD_SHARE))


def test_a_guess_never_fails() -> None:
    for length in range(300):
        assert guess_format(NOISE[:length]).name
    with pytest.raises(NotText):
        raise NotText(Path("x"), guess_format(b""), "nothing")
