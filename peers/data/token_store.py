"""The run's text as one flat array of tokens, made once, memory-mapped afterwards.

    documents --hash--> key --> <cache>/tokens/<key>.npy    all tokens, END after each document
                                <cache>/tokens/<key>.json   what the .npy must be; written last, so it vouches for it
                                <cache>/tokenizers/<key>.json

Nothing in the cache is trusted: each start hashes the tokens again (the text was read for the key anyway, and the
tokens are fewer bytes), so a damaged file is made anew and the fingerprint that a peer reports is that of the tokens
it will train on. Files are replaced whole, and all writers of a key write the same bytes. The lock saves work when
several peers start on one machine; nothing but time depends on it.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from tokenizers import Tokenizer

from peers.data import tokenizer as bpe
from peers.data.cache import one_at_a_time, write
from peers.data.given_tokenizer import check_on_text, load_given
from peers.data.sources import load_documents
from peers.data.tokenizer import Progress, Tokens
from peers.files import STALE_SECONDS, remove_temporary
from protocol.config import RunConfig
from protocol.errors import Input, InputError, UserError
from protocol.samples import Ints, sample_offsets, spaced_offsets, unigram_loss, windows

RECIPE = 1  # raise it when the layout of the tokens or of the meta file changes
HELD_OUT_SHARE = 0.02
HELD_OUT_SEQUENCES = 64
_CHUNK = 1 << 22  # tokens counted at once

log = logging.getLogger(__name__)


class DataSettings(Protocol):
    """What `prepare` reads of a run's configuration."""

    @property
    def source(self) -> str: ...
    @property
    def path(self) -> str | None: ...
    @property
    def field(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def tokenizer(self) -> str | None: ...


@dataclass(frozen=True, eq=False)
class TokenStore:
    """The tokens of a run, `[n]` each, read-only and on disk.

    `held_out` is the tail, the last HELD_OUT_SHARE of all tokens, so the document at the cut lies in both parts; no
    window does. `vocab_size` is the tokenizer's real size. `fingerprint` (sha256, hex) is that of every token and of
    what each id means. `unigram_loss` is that of `train`, in nats.
    """

    train: Tokens
    held_out: Tokens
    vocab_size: int
    fingerprint: str
    unigram_loss: float
    tokenizer: Path

    def microbatch(self, config: RunConfig, step: int, index: int) -> Ints:
        """`[B, T + 1]`: microbatch `index` of `step`. Raises UserError when the text is too short."""
        count, length = config.train.microbatch_size, config.train.sequence_length
        return windows(self.train, sample_offsets(config.seed, step, index, count, len(self.train), length), length)

    def held_out_microbatches(self, config: RunConfig) -> list[Ints]:
        """The first fixed microbatches that hold HELD_OUT_SEQUENCES. Raises UserError when the text is too short."""
        size, length = config.train.microbatch_size, config.train.sequence_length
        count = -(-HELD_OUT_SEQUENCES // size)
        return [self.held_out_microbatch(index, size, length) for index in range(count)]

    def held_out_microbatch(self, index: int, count: int, length: int) -> Ints:
        """`[count, length + 1]`: fixed windows, evenly spread. Raises UserError when the text is too short."""
        return windows(self.held_out, spaced_offsets(index, count, len(self.held_out), length), length)


@dataclass(frozen=True)
class _Meta:
    """What the .npy beside it must be."""

    recipe: int
    size_bytes: int
    tokens: int
    dtype: str
    fingerprint: str
    unigram_loss: float


def cache_folder() -> Path:
    """`$ISTHMUS_CACHE`, or `~/.cache/isthmus`, or where there is no such home a folder among the temporary files.

    Raises:
        UserError: the folder among the temporary files is somebody else's.
    """
    try:
        if given := os.environ.get("ISTHMUS_CACHE"):
            return Path(given).expanduser()
        home = Path.home() / ".cache" / "isthmus"
    except RuntimeError:  # a container with a user id that has no name, and so no home
        home = None
    if home is not None and _may_write(home):
        return home

    spare = Path(tempfile.gettempdir()) / f"isthmus-cache-{os.getuid()}"
    if spare.exists() and spare.stat().st_uid != os.getuid():
        raise UserError(f"expected a folder for the cache, {spare} is another user's: name one with ISTHMUS_CACHE")
    return spare


def _may_write(folder: Path) -> bool:
    """Whether `folder` can be written to, or made."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    return there.is_dir() and os.access(there, os.W_OK | os.X_OK)


def prepare(config: DataSettings, cache: Path, progress: Progress | None = None) -> TokenStore:
    """Read the run's text, tokenise it unless that was done before, and open the tokens.

    `config.vocab_size` sizes the tokenizer that we train; with `config.tokenizer` (a tokenizer.json) that file's own
    vocabulary counts. Raises UserError for bad data or settings, and for a cache that cannot be written.
    """
    say = progress or log.info
    source = _own_path(config.path, "data") if config.path else None
    documents = load_documents(config.source, source, config.field, say)
    job = _Job(config, cache, documents, bpe.hash_documents(documents), say)
    try:
        # Damage is told of once: by the second look, which another process may have made needless.
        if (store := job.cached(logging.DEBUG)) is not None:
            return store
        with one_at_a_time(cache, say):
            return job.cached(logging.WARNING) or job.build()
    except OSError as error:
        raise UserError(
            f"expected to read and write the cache {cache}, but: {error}; make room there or set ISTHMUS_CACHE to "
            "another folder"
        ) from error


class _Job:
    """One call of `prepare`: where its files are, and how they are read and made."""

    def __init__(self, config: DataSettings, cache: Path, documents: list[str], text_hash: str, say: Progress) -> None:
        self.documents, self.vocab_size, self.say = documents, config.vocab_size, say
        self.given = _own_path(config.tokenizer, "tokenizer") if config.tokenizer else None
        key = bpe.tokenizer_key(text_hash, config.vocab_size)
        self.tokenizer_file = self.given or cache / "tokenizers" / f"{key}.json"
        self.tokenizer = None if self.given is None else load_given(self.given, config.vocab_size)
        if self.given is not None and self.tokenizer is not None:
            check_on_text(self.tokenizer, self.given, documents, say)
            key = hashlib.sha256(self.given.read_bytes()).hexdigest()
        name = hashlib.sha256(f"{text_hash} {key} tokens-{RECIPE}".encode()).hexdigest()
        self.tokens_file = cache / "tokens" / f"{name}.npy"
        self.meta_file = self.tokens_file.with_suffix(".json")

    def cached(self, level: int) -> TokenStore | None:
        """The store, when all its files are there and sound; damage is logged at `level`."""
        self.tokenizer = tokenizer = self.tokenizer or bpe.load_cached(self.tokenizer_file, level)
        if tokenizer is None or not self.meta_file.is_file():
            return None
        try:
            meta = _Meta(**json.loads(self.meta_file.read_bytes()))
            tokens = _open_tokens(self.tokens_file, meta)
            if _fingerprint(tokenizer, tokens) != meta.fingerprint:
                raise ValueError("the tokens are not those that were written")
        except (OSError, ValueError, TypeError, EOFError) as error:
            log.log(level, "cached tokens are damaged, making them again: %s: %s", self.tokens_file, error)
            return None
        return self._store(tokenizer, tokens, meta)

    def build(self) -> TokenStore:
        """Train the tokenizer unless there is one, encode, write, and open what was written."""
        remove_temporary(self.tokens_file.parent, STALE_SECONDS)
        if self.given is None:
            remove_temporary(self.tokenizer_file.parent, STALE_SECONDS)
        tokenizer = self.tokenizer or self._train()
        tokens = bpe.encode(tokenizer, self.documents, self.say)
        size = _save_tokens(self.tokens_file, tokens)
        loss = unigram_loss(_count(_split(tokens)[0], bpe.vocabulary_size(tokenizer)))
        meta = _Meta(RECIPE, size, len(tokens), tokens.dtype.str, _fingerprint(tokenizer, tokens), loss)
        write(self.meta_file, json.dumps(asdict(meta), indent=1).encode())
        self.say(f"{len(tokens):,} tokens, {bpe.vocabulary_size(tokenizer):,} different, unigram loss {loss:.3f} nats")
        return self._store(tokenizer, _open_tokens(self.tokens_file, meta), meta)

    def _train(self) -> Tokenizer:
        characters = sum(map(len, self.documents))
        self.say(f"training a tokenizer of {self.vocab_size:,} tokens on {characters / 1e6:,.1f} M characters")
        tokenizer = bpe.train(self.documents, self.vocab_size, self.say)
        bpe.save(tokenizer, self.tokenizer_file)
        if (real := bpe.vocabulary_size(tokenizer)) < self.vocab_size:
            self.say(f"the text is too small for {self.vocab_size:,} tokens: the vocabulary has {real:,}")
        return tokenizer

    def _store(self, tokenizer: Tokenizer, tokens: Tokens, meta: _Meta) -> TokenStore:
        train, held_out = _split(tokens)
        size = bpe.vocabulary_size(tokenizer)
        return TokenStore(train, held_out, size, meta.fingerprint, meta.unigram_loss, self.tokenizer_file)


def _own_path(text: str, what: Input) -> Path:
    """The path that `text` means; raises InputError where its "~" leads nowhere."""
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        fact = f"expected a path, but got {text!r}, and there is no such home folder"
        raise InputError(what, "missing", fact, "write the path out") from error


def _split(tokens: Tokens) -> tuple[Tokens, Tokens]:
    """(train, held out): the tail is held out."""
    cut = len(tokens) - round(len(tokens) * HELD_OUT_SHARE)
    return tokens[:cut], tokens[cut:]


def _count(tokens: Tokens, vocab_size: int) -> Ints:
    """`[vocab_size]`: how often each id occurs. In chunks, as bincount makes 8 bytes of every token."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for start in range(0, len(tokens), _CHUNK):
        counts += np.bincount(tokens[start : start + _CHUNK], minlength=vocab_size)
    return counts


def _fingerprint(tokenizer: Tokenizer, tokens: Tokens) -> str:
    """sha256 (hex) of what each id means and of all tokens."""
    digest = hashlib.sha256(bpe.vocabulary_hash(tokenizer).encode())
    digest.update(tokens.data)
    return digest.hexdigest()


def _save_tokens(path: Path, tokens: Tokens) -> int:
    """Write the .npy; gives its size in bytes."""
    buffer = io.BytesIO()
    np.save(buffer, tokens, allow_pickle=False)
    write(path, buffer.getbuffer())
    return buffer.getbuffer().nbytes


def _open_tokens(path: Path, meta: _Meta) -> Tokens:
    """Map the .npy read-only; raises ValueError or OSError when it is not the one that `meta` describes."""
    if meta.recipe != RECIPE or (size := path.stat().st_size) != meta.size_bytes:
        raise ValueError(f"expected {meta.size_bytes} bytes of recipe {RECIPE}, got {size} of {meta.recipe}")
    tokens: Tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    if tokens.shape != (meta.tokens,) or tokens.dtype.str != meta.dtype:
        raise ValueError(f"expected {meta.tokens} of {meta.dtype}, got {tokens.shape} of {tokens.dtype.str}")
    return tokens
