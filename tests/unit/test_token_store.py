"""The tokenizer and the store of tokens: round trips, the cache, damage to it, and several writers at once."""

from __future__ import annotations

import fcntl
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from peers.data import tokenizer as bpe
from peers.data.cache import one_at_a_time
from peers.data.token_store import TokenStore, cache_folder, prepare
from protocol.config import parse_config
from protocol.errors import UserError

log = logging.getLogger(__name__)
ROOT = Path(__file__).resolve().parents[2]
WORDS = ["the", "stage", "sends", "coordinates", "across", "its", "boundary", "and", "a", "learner", "averages", "it"]


@dataclass(frozen=True)
class Settings:
    path: str | None
    source: str = "text"
    field: str = "text"
    vocab_size: int = 300
    tokenizer: str | None = None


def made_text(seed: int, words: int = 400) -> str:
    drawn = np.random.default_rng(seed).integers(0, len(WORDS), words)
    return " ".join(WORDS[word] for word in drawn) + "\n"


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    folder = tmp_path / "text"
    folder.mkdir()
    for seed in range(5):
        (folder / f"{seed}.txt").write_text(made_text(seed), encoding="utf-8")
    return Settings(str(folder))


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def same(a: TokenStore, b: TokenStore) -> bool:
    equal = np.array_equal(a.train, b.train) and np.array_equal(a.held_out, b.held_out)
    return equal and (a.fingerprint, a.vocab_size, a.unigram_loss) == (b.fingerprint, b.vocab_size, b.unigram_loss)


@pytest.mark.parametrize("text", ["the stage\n\n  x", "naïve 😀 \x00\x7f", "  \t\r\n", "says <|end|> in passing", ""])
def test_any_text_comes_back(text: str) -> None:
    tokenizer = bpe.train([made_text(0)], 300)
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids) == text
    assert bpe.end_id(tokenizer) == 0 and 0 not in ids


def test_training_does_not_depend_on_the_number_of_threads() -> None:
    code = "import sys; from peers.data import tokenizer as t; print(t.train([sys.argv[1]] * 3, 290).to_str())"

    def trained(threads: int) -> bytes:
        env = os.environ | {"RAYON_NUM_THREADS": str(threads)}
        return subprocess.check_output([sys.executable, "-c", code, made_text(1)], cwd=ROOT, env=env, timeout=60)

    assert trained(1) == trained(4)


def test_pieces_join_to_the_document(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bpe, "PIECE", 10)
    for text in ("", "short", "a line\nanother line\n\nand the end", "x" * 35):
        assert "".join(bpe.pieces(text)) == text
    assert list(bpe.pieces("a line\nanother\n")) == ["a line\n", "another\n"]
    assert max(map(len, bpe.pieces("x" * 35))) == 10


def test_small_batches_and_pieces_give_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    documents = [made_text(seed, 30) for seed in range(4)]
    tokenizer = bpe.train(documents, 300)
    whole = bpe.encode(tokenizer, documents, log.info)
    monkeypatch.setattr(bpe, "BATCH", 50)
    assert np.array_equal(bpe.encode(tokenizer, documents, log.info), whole)
    monkeypatch.setattr(bpe, "PIECE", 16)
    cut = bpe.encode(tokenizer, documents, log.info)
    assert (cut == 0).sum() == 4
    assert tokenizer.decode(cut.tolist(), skip_special_tokens=True) == "".join(documents)


def test_an_id_never_wraps() -> None:
    sizes = (256, 257, 65536, 65537, 2**32)
    assert [bpe.smallest_dtype(size).str for size in sizes] == ["|u1", "<u2", "<u2", "<u4", "<u4"]
    with pytest.raises(UserError, match="at most 4294967296 tokens, but got 4294967297"):
        bpe.smallest_dtype(2**32 + 1)
    with pytest.raises(UserError, match="ids up to 255, but got 256"):
        bpe._narrow(np.array([3, 256]), np.dtype("u1"))


def test_a_store_holds_the_text(settings: Settings, cache: Path) -> None:
    told: list[str] = []
    store = prepare(settings, cache, told.append)
    tokens = np.concatenate([store.train, store.held_out])
    decoded = bpe.load(store.tokenizer).decode(tokens.tolist(), skip_special_tokens=False)
    assert decoded == "".join(made_text(seed) + bpe.END for seed in range(5))
    assert store.vocab_size <= 300 and tokens.max() < store.vocab_size and tokens.dtype == np.uint16
    assert len(store.held_out) == round(len(tokens) * 0.02)
    assert 0 < store.unigram_loss < np.log(store.vocab_size)
    assert len(store.fingerprint) == 64 and any("training a tokenizer" in line for line in told)


def test_microbatches(settings: Settings, cache: Path) -> None:
    store = prepare(settings, cache)
    config = parse_config({"seed": 1, "train": {"microbatch_size": 4, "sequence_length": 16}}, "test")
    batch = store.microbatch(config, 2, 3)
    assert batch.shape == (4, 17) and batch.dtype == np.int64
    assert np.array_equal(batch, store.microbatch(config, 2, 3))
    assert not np.array_equal(batch, store.microbatch(config, 3, 3))
    assert [held_out.shape for held_out in store.held_out_microbatches(config)] == [(4, 17)] * 16
    assert store.held_out_microbatch(0, 2, 8)[0].tolist() == store.held_out[:9].tolist()
    with pytest.raises(UserError, match="for a window of length 4096"):
        store.held_out_microbatch(0, 2, 4096)
    with pytest.raises(ValueError, match="read-only"):
        store.train[0] = 1


def test_the_second_start_builds_nothing(settings: Settings, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = prepare(settings, cache)
    monkeypatch.delattr(bpe, "train")
    monkeypatch.delattr(bpe, "encode")
    second = prepare(settings, cache)
    assert same(first, second) and isinstance(second.train, np.memmap)


def test_a_changed_document_changes_the_fingerprint(settings: Settings, cache: Path) -> None:
    first = prepare(settings, cache)
    file = Path(str(settings.path), "3.txt")
    file.write_text(file.read_text().replace("stage", "state", 1))
    assert prepare(settings, cache).fingerprint != first.fingerprint
    assert bpe.hash_documents(["ab", "c"]) != bpe.hash_documents(["a", "bc"])


def test_mistakes_are_named(settings: Settings, cache: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"at least 257 tokens .* but got 100; set a larger vocab_size"):
        prepare(replace(settings, vocab_size=100), cache)
    with pytest.raises(UserError, match=r"expected a file or a folder of text at .*gone, but nothing is there"):
        prepare(Settings(str(tmp_path / "gone")), cache)
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match="set ISTHMUS_CACHE to another folder"):
        prepare(settings, tmp_path / "file")


def test_a_text_too_small_for_the_vocabulary_tells_its_real_size(settings: Settings, cache: Path) -> None:
    told: list[str] = []
    store = prepare(replace(settings, vocab_size=50_000), cache, told.append)
    assert 257 < store.vocab_size < 1_000
    assert any(f"the vocabulary has {store.vocab_size}" in line for line in told)


def test_the_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ISTHMUS_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path
    monkeypatch.delenv("ISTHMUS_CACHE")
    assert cache_folder() == Path.home() / ".cache" / "isthmus"


def test_a_given_tokenizer_is_used(settings: Settings, cache: Path, tmp_path: Path) -> None:
    made = bpe.train([made_text(9)], 270)
    made.enable_truncation(5)
    made.enable_padding(length=5)
    bpe.save(made, tmp_path / "tokenizer.json")
    store = prepare(replace(settings, tokenizer=str(tmp_path / "tokenizer.json")), cache)
    assert store.tokenizer == tmp_path / "tokenizer.json" and store.vocab_size == 270
    assert len(store.train) > 1_000 and not (cache / "tokenizers").exists()
    assert same(store, prepare(replace(settings, tokenizer=str(store.tokenizer)), cache))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"expected a tokenizer\.json at .* but no file is there"),
        ("{}", r"expected a tokenizer\.json at .* but it does not load"),
        (bpe.train(["x"], 257).to_str().replace(bpe.END, "<|x|>"), r"it has none of .*add <\|end\|> to its special"),
    ],
)
def test_a_bad_given_tokenizer(
    settings: Settings, cache: Path, tmp_path: Path, content: str | None, message: str
) -> None:
    if content is not None:
        (tmp_path / "t.json").write_text(content, encoding="utf-8")
    with pytest.raises(UserError, match=message):
        prepare(replace(settings, tokenizer=str(tmp_path / "t.json")), cache)


DAMAGE: dict[str, tuple[str, Callable[[bytes], bytes | None]]] = {
    "truncated": ("tokens/*.npy", lambda raw: raw[: len(raw) // 2]),
    "flipped bit": ("tokens/*.npy", lambda raw: raw[:-1] + bytes([raw[-1] ^ 1])),
    "tokens gone": ("tokens/*.npy", lambda raw: None),
    "meta not JSON": ("tokens/*.json", lambda raw: b"{"),
    "meta of another make": ("tokens/*.json", lambda raw: b'{"version": 3}'),
    "tokenizer": ("tokenizers/*.json", lambda raw: b"{"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_cache_is_made_again(
    settings: Settings, cache: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    first = prepare(settings, cache)
    pattern, change = DAMAGE[kind]
    (file,) = cache.glob(pattern)
    raw = change(file.read_bytes())
    file.unlink()  # a new file: `first` still maps the old one
    if raw is not None:
        file.write_bytes(raw)
    assert same(prepare(settings, cache), first)
    assert [record.levelno for record in caplog.records if "damaged" in record.message] == [logging.WARNING]
    caplog.clear()
    assert same(prepare(settings, cache), first)
    assert not caplog.records


def test_leftovers_of_a_killed_writer(settings: Settings, cache: Path) -> None:
    (cache / "tokens").mkdir(parents=True)
    old, young = cache / "tokens" / ".x.npy.a.tmp", cache / "tokens" / ".x.npy.b.tmp"
    for file in (old, young):
        file.write_bytes(b"half")
    os.utime(old, (0, 0))
    prepare(settings, cache)
    assert not old.exists() and young.exists()
    assert {file.stat().st_mode & 0o777 for file in cache.glob("*/[!.]*")} == {0o600}


PREPARE = """
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from peers.data import token_store
if sys.argv[3] == "unlocked":  # as on a file system without locks
    token_store.one_at_a_time = lambda *_: nullcontext()
settings = SimpleNamespace(source="text", path=sys.argv[1], field="text", vocab_size=300, tokenizer=None)
print("ready", flush=True)
sys.stdin.readline()
print(token_store.prepare(settings, Path(sys.argv[2])).fingerprint)
"""


@pytest.mark.parametrize("lock", ["locked", "unlocked"])
def test_two_processes_at_once(settings: Settings, cache: Path, lock: str) -> None:
    command = [sys.executable, "-c", PREPARE, str(settings.path), str(cache), lock]
    pipe = subprocess.PIPE
    both = [subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=pipe, text=True) for _ in range(2)]
    try:
        for process in both:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
        for process in both:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        outputs = [process.communicate(timeout=60) for process in both]
    finally:
        for process in both:
            process.kill()
            process.wait()
    assert [process.returncode for process in both] == [0, 0], outputs
    assert outputs[0][0] == outputs[1][0] == prepare(settings, cache).fingerprint + "\n"
    assert not list(cache.glob("*/.*.tmp"))


def test_who_waits_for_the_lock_says_so(cache: Path) -> None:
    cache.mkdir()
    told: list[str] = []
    with (cache / ".lock").open("a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)

        def say(message: str) -> None:
            told.append(message)
            fcntl.flock(other, fcntl.LOCK_UN)

        with one_at_a_time(cache, say):
            assert told == [f"waiting for another process that prepares data in {cache}"]


def test_without_a_home_the_cache_is_among_the_temporary_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A container's user may be a bare number: no home is known, or it is one that it may not write to."""

    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("ISTHMUS_CACHE", raising=False)
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    expected = tmp_path / f"isthmus-cache-{os.getuid()}"
    with monkeypatch.context() as patched:
        patched.setattr(Path, "home", nowhere)
        assert cache_folder() == expected
    with monkeypatch.context() as patched:
        patched.setattr(os, "access", lambda *_: False)
        assert cache_folder() == expected


def test_a_spare_cache_of_another_user_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("ISTHMUS_CACHE", raising=False)
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(os, "access", lambda *_: False)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    (tmp_path / "isthmus-cache-12345").mkdir()
    with pytest.raises(UserError, match="ISTHMUS_CACHE"):
        cache_folder()
