"""A tokenizer that was made elsewhere, and whether it fits the run's own text.

Such a tokenizer may not know all of the text. What it does not know becomes its unknown token, or nothing at all, and a
model would be trained on the rest. So a sample of the text is encoded, and the characters that no known token stands
for are counted: all white space aside, which many tokenizers leave out by design. One that loses LEAST_LOST of them or
more is said to; one that loses MOST_LOST was made for another language, and is refused. Between the two lie a foreign
name or a rare sign in a text, below them nothing that training would notice.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import Encoding, Tokenizer

from peers.data import tokenizer as bpe
from peers.data.tokenizer import Progress
from protocol.errors import InputError

LEAST_LOST = 0.001
MOST_LOST = 0.05
SLICES, SLICE = 64, 4096  # how many places of the text are looked at, and how many characters at each
_SHOWN = 24


def load_given(path: Path, most_ids: int) -> Tokenizer:
    """The tokenizer.json at `path`.

    Raises:
        InputError: it is missing, not one, has more than `most_ids` ids, or none that can end a document.
    """
    tokenizer = bpe.load(path)
    if (size := bpe.vocabulary_size(tokenizer)) > most_ids:
        fact = f"expected a tokenizer of at most data.vocab_size = {most_ids} ids, {path} has {size}"
        raise InputError("tokenizer", "unfit", fact, "set data.vocab_size to that")
    bpe.end_id(tokenizer)
    return tokenizer


def check_on_text(tokenizer: Tokenizer, path: Path, documents: list[str], say: Progress) -> None:
    """Check on a sample of the run's text that the tokenizer at `path` keeps it; `say` what it loses.

    Raises:
        InputError: it cannot encode the text, or loses too much of it.
    """
    texts = sample(documents)
    fact = f"expected a tokenizer that can encode the run's text, but {path} fails"
    with bpe.library_errors(fact, "give it a token for what it does not know, or use another"):
        encodings = tokenizer.encode_batch(texts, add_special_tokens=False)
    unknown = unknown_id(tokenizer)
    lost = [mark for text, found in zip(texts, encodings, strict=True) for mark in _lost(text, found, unknown)]
    characters = sum(not mark.isspace() for text in texts for mark in text)
    share = len(lost) / max(1, characters)
    examples = " ".join(sorted(set(lost))[:8])
    told = f"{100 * share:.2g} % of the text's characters have no token in {path}, such as {examples!r}"
    if share > MOST_LOST:
        fact = f"expected a tokenizer that knows the run's text, but {told}"
        raise InputError("tokenizer", "unfit", fact, "use one that was made for such text, or one with byte fallback")
    if share >= LEAST_LOST:
        say(f"warning: {told}: the model never sees them")
    elif (difference := _difference(tokenizer, texts, encodings)) is not None:
        say(f"{path} does not give the text back as it was: {difference}")


def sample(documents: list[str]) -> list[str]:
    """Up to SLICES x SLICE characters of the text, from places that are evenly spread over it."""
    ends = np.cumsum([len(document) for document in documents])
    total = int(ends[-1])
    if total <= SLICES * SLICE:
        return documents
    texts: list[str] = []
    for index in range(SLICES):
        start = index * (total - SLICE) // (SLICES - 1)
        stop = start + SLICE
        while start < stop:
            number = int(np.searchsorted(ends, start, side="right"))
            begin = int(ends[number]) - len(documents[number])
            texts.append(documents[number][start - begin : stop - begin])
            start += len(texts[-1])
    return texts


def unknown_id(tokenizer: Tokenizer) -> int | None:
    """The id that stands for what the tokenizer does not know; None where it has none."""
    model = json.loads(tokenizer.to_str())["model"]
    if model.get("unk_id") is not None:
        return int(model["unk_id"])
    name = model.get("unk_token")
    found: int | None = None if name is None else tokenizer.token_to_id(name)
    return found


def _lost(text: str, encoding: Encoding, unknown: int | None) -> Iterator[str]:
    """The characters of `text`, without white space, that no known token stands for."""
    known = bytearray(len(text))
    for token, (start, stop) in zip(encoding.ids, encoding.offsets, strict=True):
        if token != unknown:
            known[start:stop] = b"\1" * (stop - start)
    return (mark for mark, kept in zip(text, known, strict=True) if not kept and not mark.isspace())


def _difference(tokenizer: Tokenizer, texts: list[str], encodings: list[Encoding]) -> str | None:
    """The first place where what comes back differs from the text; None where nothing does."""
    for text, encoding in zip(texts, encodings, strict=True):
        back = tokenizer.decode(encoding.ids, skip_special_tokens=False)
        if back.strip() == text.strip():
            continue
        wanted, came = text.strip(), back.strip()
        at = next(
            (i for i, (a, b) in enumerate(zip(wanted, came, strict=False)) if a != b), min(len(wanted), len(came))
        )
        start = max(0, at - _SHOWN // 2)
        return f"{wanted[start : start + _SHOWN]!r} comes back as {came[start : start + _SHOWN]!r}"
    return None
