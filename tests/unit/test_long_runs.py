"""A run without a boundary costs the tokenizer's training no more than other text, and encoding cuts it alike."""

from __future__ import annotations

import base64
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from peers.data import sign_of_life as life
from peers.data import tokenizer as bpe
from peers.data.sign_of_life import sign_of_life
from peers.data.sources import load_documents

RANDOM = np.random.default_rng(5)
RUNS: dict[str, Callable[[int], str]] = {
    "abab": lambda length: "ab" * (length // 2),
    "ACGT": lambda length: "".join(RANDOM.choice(list("ACGT"), length)),
    "spaces": lambda length: " " * length,
    "dashes": lambda length: "-" * length,
    "digits": lambda length: "".join(RANDOM.choice(list("0123456789"), length)),
    "Chinese": lambda length: "".join(map(chr, RANDOM.integers(0x4E00, 0x4E00 + 300, length))),
    "base64": lambda length: base64.b64encode(RANDOM.bytes(length)).decode(),
    "newlines": lambda length: "\n" * length,
    "apostrophes": lambda length: "'" * length + "s",
}


def by_gpt2s_own_pattern(documents: list[str], vocab_size: int) -> Tokenizer:
    """What this project trained before it cut long runs."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[bpe.END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


def longest_word(text: str) -> int:
    return max(stop - start for _, (start, stop) in bpe.words().pre_tokenize_str(text))


@pytest.mark.parametrize("kind", RUNS)
def test_no_word_is_longer_than_a_run_and_its_space(kind: str) -> None:
    """Training takes the square of it: 160,000 characters in one word took minutes."""
    text = "some words, " + RUNS[kind](20_000) + " and others"
    assert longest_word(text) <= bpe.LONGEST_RUN + 1
    assert longest_word(text) >= bpe.LONGEST_RUN or kind == "base64"  # there a word ends where digits begin


@pytest.mark.parametrize("kind", RUNS)
def test_a_long_run_comes_back_and_is_learnt(kind: str) -> None:
    text = RUNS[kind](20_000)
    tokenizer = bpe.train([text], 300)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids) == text
    assert len(ids) < len(text.encode())
    # Whoever loads the file cuts like the trainer: the cut is in it.
    assert Tokenizer.from_str(tokenizer.to_str()).encode(text, add_special_tokens=False).ids == ids


def test_a_text_without_long_runs_has_the_tokens_it_always_had() -> None:
    """All measured figures are of the standard library's text, in vocabularies of 257 to 4,096 tokens."""
    documents = load_documents("stdlib", None)[::6]
    assert max(map(longest_word, documents)) <= bpe.LONGEST_RUN // 2
    ours, before = bpe.train(documents, 600), by_gpt2s_own_pattern(documents, 600)
    assert bpe.vocabulary_hash(ours) == bpe.vocabulary_hash(before)
    sample = documents[:40]
    assert [e.ids for e in ours.encode_batch(sample)] == [e.ids for e in before.encode_batch(sample)]


@pytest.mark.parametrize("run", ["x", " ", "7", "-", "é", "\n", "\t "])
def test_runs_up_to_the_limit_are_whole(run: str) -> None:
    before = pre_tokenizers.ByteLevel(add_prefix_space=False)
    for text in (run * bpe.LONGEST_RUN, f"it's {run * (bpe.LONGEST_RUN // len(run) - 1)}word", f" {run} 'll {run}"):
        text = text[: bpe.LONGEST_RUN]
        assert bpe.words().pre_tokenize_str(text) == before.pre_tokenize_str(text)


def test_long_work_gives_signs_of_life_and_short_work_none(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    with sign_of_life(told.append, "short"):
        pass
    assert told == []
    monkeypatch.setattr(life, "FIRST_SECONDS", 0.01)
    enough = threading.Event()

    def say(text: str) -> None:
        told.append(text)
        if len(told) == 3:
            enough.set()

    with sign_of_life(say, "reading"):
        assert enough.wait(60)
    count = len(told)
    assert all(text.startswith("reading: ") and text.endswith(" s so far") for text in told)
    time.sleep(0.2)
    assert len(told) == count


def test_training_in_the_library_gives_signs_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is one call that comes back at its end, and must let other threads speak meanwhile."""
    monkeypatch.setattr(life, "FIRST_SECONDS", 1e-4)
    told: list[str] = []
    bpe.train([RUNS["base64"](300_000)], 2_000, told.append)
    assert any("training the tokenizer" in line for line in told)
