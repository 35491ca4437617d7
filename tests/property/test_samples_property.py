"""Properties of the draws: in range, a function of their arguments, different for different microbatches."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from protocol.samples import sample_offsets, spaced_offsets, unigram_loss, windows

WORDS = st.integers(0, 2**64 - 1)
LENGTHS = st.integers(1, 4096)
EXTRA = st.integers(1, 2**40)
COUNTS = st.integers(1, 64)


@given(WORDS, WORDS, WORDS, COUNTS, EXTRA, LENGTHS)
def test_offsets_are_in_range(seed: int, step: int, microbatch: int, count: int, extra: int, length: int) -> None:
    offsets = sample_offsets(seed, step, microbatch, count, length + extra, length)
    assert offsets.shape == (count,) and offsets.dtype == np.int64
    assert offsets.min() >= 0 and offsets.max() + length + 1 <= length + extra


@given(WORDS, WORDS, WORDS, COUNTS, EXTRA)
def test_offsets_depend_on_their_arguments_only(seed: int, step: int, microbatch: int, count: int, extra: int) -> None:
    first = sample_offsets(seed, step, microbatch, count, 8 + extra, 8)
    np.random.seed(step % 2**32)  # the global generator is somebody else's
    sample_offsets(seed, step, microbatch ^ 1, count, 8 + extra, 8)
    assert np.array_equal(sample_offsets(seed, step, microbatch, count, 8 + extra, 8), first)


@given(WORDS, WORDS, WORDS, st.integers(1, 32), st.integers(1, 32))
def test_a_shorter_draw_is_the_head_of_a_longer(seed: int, step: int, microbatch: int, count: int, more: int) -> None:
    short, long = (sample_offsets(seed, step, microbatch, n, 2**40, 8) for n in (count, count + more))
    assert np.array_equal(short, long[:count])


@given(st.lists(st.tuples(WORDS, WORDS, WORDS), min_size=2, max_size=8, unique=True))
def test_different_seeds_steps_and_microbatches_draw_differently(keys: list[tuple[int, int, int]]) -> None:
    drawn = {tuple(sample_offsets(*key, 8, 2**40, 8).tolist()) for key in keys}
    assert len(drawn) == len(keys)


@given(st.integers(0, 2**20), COUNTS, EXTRA, LENGTHS)
def test_held_out_offsets_are_in_range_and_evenly_spread(index: int, count: int, extra: int, length: int) -> None:
    offsets = spaced_offsets(index, count, length + extra, length)
    assert offsets.min() >= 0 and offsets.max() + length + 1 <= length + extra
    gaps = np.diff(offsets)
    assert gaps.size == 0 or gaps.max() - gaps.min() <= 1


@given(st.integers(1, 200), st.integers(1, 16), WORDS)
def test_windows_are_stretches_of_the_text(extra: int, length: int, seed: int) -> None:
    tokens = np.random.default_rng(seed).integers(0, 65536, length + extra).astype(np.uint16)
    offsets = sample_offsets(seed, 0, 0, 5, len(tokens), length)
    for row, offset in zip(windows(tokens, offsets, length), offsets, strict=True):
        assert np.array_equal(row, tokens[offset : offset + length + 1])


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=50).filter(any))
def test_unigram_loss_lies_between_zero_and_that_of_equal_shares(counts: list[int]) -> None:
    assert 0.0 <= unigram_loss(counts) <= np.log(len(counts)) + 1e-9
