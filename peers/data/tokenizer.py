"""A byte-level BPE tokenizer, trained once on the run's own text and kept under the hash of what it was made from.

Training is deterministic: the same documents, vocabulary size and recipe give the same file on every peer, whatever
the number of threads. Every byte has a token of its own, so any text can be encoded and comes back unchanged.

Words are what GPT-2's pattern makes of a text: merges stay inside them. Training takes time with the square of a word's
length, and a line of base64 or of Chinese is one word to that pattern; so a longer run is cut after every LONGEST_RUN
characters. The cut is part of the tokenizer: whoever encodes with it cuts alike. A text without such a run (the
standard library's longest is 96) gets the tokens that GPT-2's own pattern gives it.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from peers.data.cache import write
from peers.data.sign_of_life import sign_of_life
from protocol.errors import InputError, UserError

log = logging.getLogger(__name__)

END = "<|end|>"  # stands between documents; id 0 in every tokenizer that we train
# What tokenizers made elsewhere call the end of a document, most explicit first.
END_NAMES = (END, "<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "</s>", "<eos>", "[EOS]", "[SEP]")
SMALLEST_VOCABULARY = 257  # one token per byte and END
RECIPE = 2  # raise it when anything that changes the trained file changes
LONGEST_RUN = 256  # characters
PIECE = 1 << 20  # characters
BATCH = 1 << 21  # characters encoded at once
# GPT-2's, but that no repetition is endless.
_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}{1,N}| ?\p{N}{1,N}| ?[^\s\p{L}\p{N}]{1,N}|\s{1,N}(?!\S)|\s{1,N}"

Tokens = npt.NDArray[np.unsignedinteger]
Progress = Callable[[str], None]


def hash_documents(documents: list[str]) -> str:
    """sha256 (hex) of the documents. Their lengths are hashed as well, so moving a boundary changes it."""
    digest = hashlib.sha256()
    for document in documents:
        raw = document.encode("utf-8")
        digest.update(len(raw).to_bytes(8, "little"))
        digest.update(raw)
    return digest.hexdigest()


def tokenizer_key(documents_hash: str, vocab_size: int) -> str:
    """The cache key of the tokenizer that `trained` makes of these documents."""
    return hashlib.sha256(f"{documents_hash} {vocab_size} bpe-{RECIPE}".encode()).hexdigest()


def words() -> pre_tokenizers.PreTokenizer:
    """What cuts a text into words, and spells each as characters that stand for its bytes."""
    pattern = Regex(_WORDS.replace(",N", f",{LONGEST_RUN}"))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(pattern, "isolated"), byte_level])


def train(documents: list[str], vocab_size: int, say: Progress = log.info) -> Tokenizer:
    """Train on `documents`. A small text may yield fewer than `vocab_size` tokens.

    Raises UserError when `vocab_size` cannot hold every byte and END.
    """
    if vocab_size < SMALLEST_VOCABULARY:
        raise UserError(
            f"expected a vocabulary of at least {SMALLEST_VOCABULARY} tokens (256 bytes and {END}), but got "
            f"{vocab_size}; set a larger vocab_size"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = words()
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    with sign_of_life(say, "training the tokenizer"):
        tokenizer.train_from_iterator((piece for document in documents for piece in pieces(document)), trainer)
    return _plain(tokenizer)


def load(path: Path) -> Tokenizer:
    """Read a tokenizer.json, ours or another's.

    Raises:
        InputError: it is missing, or not one.
    """
    if not path.is_file():
        fact = f"expected a tokenizer.json at {path}, but no file is there"
        inside = path / "tokenizer.json"
        hint = f"name {inside}" if inside.is_file() else "correct the tokenizer's path"
        raise InputError("tokenizer", "missing", fact, hint)
    fact = f"expected a tokenizer.json at {path}, but it does not load"
    with library_errors(fact, "use one that the library tokenizers wrote"):
        tokenizer = Tokenizer.from_file(str(path))
    if not tokenizer.get_vocab():
        raise InputError(
            "tokenizer", "unfit", f"expected a tokenizer.json at {path}, but it has no tokens", "use another"
        )
    return _plain(tokenizer)


@contextmanager
def library_errors(fact: str, remedy: str) -> Iterator[None]:
    """Turn the library's errors, which are bare Exceptions or panics (not even those), into an InputError."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise InputError("tokenizer", "unfit", f"{fact} ({error})", remedy) from error


def load_cached(path: Path, level: int) -> Tokenizer | None:
    """The tokenizer at a place in the cache; None when it is not there, or is damaged (logged at `level`)."""
    if not path.is_file():
        return None
    try:
        return load(path)
    except UserError as error:
        log.log(level, "cached tokenizer is damaged, training it again: %s", error)
        return None


def save(tokenizer: Tokenizer, path: Path) -> None:
    """Write tokenizer.json whole or not at all."""
    write(path, tokenizer.to_str(pretty=True).encode("utf-8"))


def end_id(tokenizer: Tokenizer) -> int:
    """The id that stands after each document; raises InputError when the tokenizer has none that we know."""
    for name in END_NAMES:
        if (token := tokenizer.token_to_id(name)) is not None:
            return token
    fact = f"expected a tokenizer with a token for the end of a document, but it has none of {', '.join(END_NAMES)}"
    raise InputError("tokenizer", "unfit", fact, f"add {END} to its special tokens")


def vocabulary_size(tokenizer: Tokenizer) -> int:
    """One more than the highest id. (Tokenizers made elsewhere may leave ids unused, so their count is too low.)"""
    return max(tokenizer.get_vocab().values()) + 1


def vocabulary_hash(tokenizer: Tokenizer) -> str:
    """sha256 (hex) of what each id means.

    Not of the file: its spelling changes between versions of the library, which would tell two peers that agree on
    every token that they hold different data.
    """
    pairs = sorted((token, name) for name, token in tokenizer.get_vocab().items())
    return hashlib.sha256(repr(pairs).encode("utf-8", "backslashreplace")).hexdigest()


def pieces(document: str) -> Iterator[str]:
    """Cut a document into parts of at most PIECE characters, after a line end where there is one.

    An encoding takes some hundred bytes a token: a book in one piece would take gigabytes.
    """
    start = 0
    while len(document) - start > PIECE:
        stop = document.rfind("\n", start, start + PIECE) + 1 or start + PIECE
        yield document[start:stop]
        start = stop
    yield document[start:]


def smallest_dtype(vocab_size: int) -> np.dtype[np.unsignedinteger]:
    """The smallest little-endian unsigned type that holds ids below `vocab_size`; raises UserError over 2**32."""
    for name in ("<u1", "<u2", "<u4"):
        if vocab_size - 1 <= np.iinfo(name).max:
            return np.dtype(name)
    raise UserError(f"expected a vocabulary of at most {2**32} tokens, but got {vocab_size}; use another tokenizer")


def encode(tokenizer: Tokenizer, documents: list[str], say: Progress) -> Tokens:
    """`[n]`: the tokens of all documents, END after each.

    Raises:
        InputError: the tokenizer cannot encode them.
    """
    dtype, end = smallest_dtype(vocabulary_size(tokenizer)), np.array([end_id(tokenizer)], dtype=np.int64)
    parts: list[Tokens] = []
    done, total, told = 0, sum(map(len, documents)), time.monotonic()
    for batch in _batches(documents):
        with sign_of_life(say, f"tokenising, {100 * done // total} % done"), _encoding():
            encoded = tokenizer.encode_batch_fast([text for text, _ in batch], add_special_tokens=False)
        for (text, last), encoding in zip(batch, encoded, strict=True):
            parts += [_narrow(np.array(encoding.ids, dtype=np.int64), dtype)] + [_narrow(end, dtype)] * last
            done += len(text)
        if time.monotonic() - told > 2.0:
            told = time.monotonic()
            say(f"tokenising: {100 * done // total} %")
    return np.concatenate(parts)


def _encoding() -> AbstractContextManager[None]:
    fact = "expected a tokenizer that can encode the run's text, but it fails"
    return library_errors(fact, "give it a token for what it does not know, or use another")


def _batches(documents: list[str]) -> Iterator[list[tuple[str, bool]]]:
    """(piece, whether it ends its document), in order, some BATCH characters at a time."""
    batch: list[tuple[str, bool]] = []
    size = 0
    for document in documents:
        cut = list(pieces(document))
        for number, piece in enumerate(cut, start=1):
            batch.append((piece, number == len(cut)))
            size += len(piece)
            if size >= BATCH:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def _narrow(ids: npt.NDArray[np.int64], dtype: np.dtype[np.unsignedinteger]) -> Tokens:
    """`ids` as `dtype`; raises UserError rather than let an id wrap into another."""
    if ids.size and int(ids.max()) > np.iinfo(dtype).max:
        raise UserError(f"expected ids up to {np.iinfo(dtype).max}, but got {ids.max()}; use another tokenizer")
    return ids.astype(dtype)


def _plain(tokenizer: Tokenizer) -> Tokenizer:
    """Undo what would change the text: cutting, padding, and reading END out of a document that merely quotes it."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return tokenizer
