"""What a file is that is not text, told from its bytes, and the command that makes text of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Format:
    """`name`: with its article, for a message. `remedy`: a command, in which {file} stands for the file's name."""

    name: str
    remedy: str


_NO_TEXT = "take it out of the data"
_TABLE = 'write its column of text as JSON lines, for source = "jsonl"'
_UTF16 = Format("UTF-16 text", "iconv -f UTF-16 -t UTF-8 {file} > NEW")
_UTF32 = Format("UTF-32 text", "iconv -f UTF-32 -t UTF-8 {file} > NEW")
_IMAGE = Format("an image", _NO_TEXT)
_SOUND = Format("sound or video", _NO_TEXT)
_PROGRAM = Format("a compiled program", _NO_TEXT)

# Bytes that no text begins with. UTF-32's mark begins like UTF-16's, so it stands first.
_MAGIC = {
    b"\xff\xfe\x00\x00": _UTF32,
    b"\x00\x00\xfe\xff": _UTF32,
    b"\xff\xfe": _UTF16,
    b"\xfe\xff": _UTF16,
    b"\x1f\x8b": Format("a gzip archive", "gunzip {file}"),
    b"\x28\xb5\x2f\xfd": Format("a zstd archive", "unzstd {file}"),
    b"\xfd7zXZ\x00": Format("an xz archive", "unxz {file}"),
    b"\x04\x22\x4d\x18": Format("an lz4 archive", "unlz4 {file}"),
    b"7z\xbc\xaf\x27\x1c": Format("a 7z archive", "7z x {file}"),
    b"PK\x03\x04": Format("a zip archive (or an office document, an e-book, a model)", "unzip {file}"),
    b"Rar!\x1a\x07": Format("a rar archive", "unrar x {file}"),
    b"SQLite format 3\x00": Format("an SQLite database", _TABLE),
    b"%PDF-": Format("a PDF document", "pdftotext {file} NEW"),
    b"\xd0\xcf\x11\xe0": Format("an old office document", "save it as plain text"),
    b"ARROW1\x00\x00": Format("an Arrow file", _TABLE),
    b"\x89HDF\r\n": Format("an HDF5 file", _TABLE),
    b"\x93NUMPY": Format("a numpy array", _NO_TEXT),
    b"\x89PNG\r\n": _IMAGE,
    b"\xff\xd8\xff": _IMAGE,
    b"\x7fELF": _PROGRAM,
    b"\xca\xfe\xba\xbe": _PROGRAM,
    b"\xcf\xfa\xed\xfe": _PROGRAM,
    b"\x00asm": _PROGRAM,
}

# Beginnings that a text might have too: they count where the rest is no text either.
_MAGIC_IF_ODD = {
    b"PAR1": Format("a parquet file", _TABLE),
    b"FEA1": Format("a feather file", _TABLE),
    b"ORC": Format("an ORC file", _TABLE),
    b"Obj\x01": Format("an Avro file", _TABLE),
    b"BZh": Format("a bzip2 archive", "bunzip2 {file}"),
    b"GIF8": _IMAGE,
    b"RIFF": _SOUND,
    b"OggS": _SOUND,
    b"ID3": _SOUND,
    b"fLaC": _SOUND,
    b"II*\x00": _IMAGE,
    b"MM\x00*": _IMAGE,
    b"MZ": _PROGRAM,
    b"\x80\x02": Format("a Python pickle", _NO_TEXT),
    b"\x80\x04": Format("a Python pickle", _NO_TEXT),
    b"\x80\x05": Format("a Python pickle", _NO_TEXT),
}

_BINARY = Format("binary data", _NO_TEXT)
_TAR = Format("a tar archive", "tar xf {file}")
_WESTERN = Format(
    "text in another encoding than UTF-8, such as Latin-1 or Windows-1252",
    "iconv -f WINDOWS-1252 -t UTF-8 {file} > NEW",
)
_OTHER_ENCODING = Format(
    "text in another encoding than UTF-8, such as Windows-1251, GB18030 or Shift-JIS (iconv -l lists them)",
    "iconv -f ENCODING -t UTF-8 {file} > NEW",
)
# Control characters that a text may have: backspace to carriage return (tabs, lines, pages) and escape.
_CONTROLS = bytes(set(range(32)) - {*range(8, 14), 27})
_SAMPLE = 1 << 16


def marked_format(raw: bytes) -> Format | None:
    """The format that the first bytes of `raw` name, whatever follows; None when they name none."""
    return next((found for magic, found in _MAGIC.items() if raw.startswith(magic)), None)


def count_controls(raw: bytes) -> int:
    """How many bytes of `raw` are control characters that no text has; NUL is one."""
    return len(raw) - len(raw.translate(None, _CONTROLS))


def guess_format(raw: bytes) -> Format:
    """What `raw` most likely is, which was found not to be UTF-8 text."""
    for magic, found in _MAGIC_IF_ODD.items():
        if raw.startswith(magic):
            return found
    if raw[257:262] == b"ustar":
        return _TAR
    sample = raw[:_SAMPLE]
    if _is_wide(sample):
        return _UTF16
    # Text has hardly any control characters, in whatever encoding of single or double bytes.
    if count_controls(sample) > len(sample) // 100:
        return _BINARY
    high = len(sample) - len(sample.translate(None, bytes(range(128, 256))))
    return _OTHER_ENCODING if high > len(sample) // 4 else _WESTERN


def _is_wide(sample: bytes) -> bool:
    """Whether it looks like UTF-16 without its mark: every second byte is often NUL, the others never."""
    zeros = [sample[side::2].count(0) for side in (0, 1)]
    return max(zeros) > len(sample) // 8 and min(zeros) <= max(zeros) // 50
