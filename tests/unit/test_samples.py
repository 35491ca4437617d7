"""Which tokens a microbatch holds."""

from __future__ import annotations

import math

import numpy as np
import pytest

from protocol.errors import UserError
from protocol.samples import epoch_places, sample_offsets, spaced_offsets, unigram_loss, windows


def test_the_draws_are_pinned() -> None:
    """Every peer of every version must draw these: a change here breaks runs that are under way."""
    assert sample_offsets(0, 0, 0, 4, 1_000_000, 128).tolist() == [408721, 59696, 606053, 460020]
    assert sample_offsets(7, 12345, 3, 4, 2**40, 1024).tolist() == [
        431989472809,
        360296300525,
        775891496610,
        707081691266,
    ]


def test_the_order_of_an_epoch_is_pinned() -> None:
    assert epoch_places(7, 1, 0, 5, 1, 5).tolist() == [2, 4, 3, 1, 0]
    assert epoch_places(7, 2, 0, 5, 1, 5).tolist() == [3, 1, 0, 2, 4]


def test_microbatches_take_an_epoch_in_turn() -> None:
    """Steps, microbatches and epochs of odd sizes: 3 microbatches of 4 out of 10 samples."""
    drawn = np.concatenate([epoch_places(1, step, m, 4, 3, 10) for step in range(1, 6) for m in range(3)])
    epochs = drawn.reshape(6, 10)
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs.tolist())
    assert len({tuple(epoch) for epoch in epochs.tolist()}) == 6


def test_no_sample_at_all_is_refused() -> None:
    with pytest.raises(UserError, match="expected at least one sample"):
        epoch_places(0, 1, 0, 1, 1, 0)


def test_windows_hold_inputs_and_next_token_targets() -> None:
    cut = windows(np.arange(10, 30, dtype=np.uint16), np.array([0, 5]), 3)
    assert cut.dtype == np.int64
    assert cut.tolist() == [[10, 11, 12, 13], [15, 16, 17, 18]]


def test_the_last_window_ends_with_the_text() -> None:
    assert set(sample_offsets(1, 0, 0, 200, 6, 4).tolist()) == {0, 1}
    assert windows(np.arange(6), np.array([1]), 4).tolist() == [[1, 2, 3, 4, 5]]


def test_a_window_past_the_end_is_refused() -> None:
    with pytest.raises(IndexError):
        windows(np.arange(6), np.array([2]), 4)


@pytest.mark.parametrize(
    "draw", [lambda n, t: sample_offsets(0, 0, 0, 1, n, t), lambda n, t: spaced_offsets(0, 1, n, t)]
)
def test_a_text_shorter_than_a_window_names_both_numbers(draw) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UserError, match=r"at least 9 tokens .* has 8; use more text or a shorter length"):
        draw(8, 8)
    assert draw(9, 8).tolist() == [0]


def test_offsets_are_uniform() -> None:
    counts = np.bincount(sample_offsets(3, 1, 4, 100_000, 15, 5), minlength=10)
    assert counts.min() > 9_500 and counts.max() < 10_500


def test_held_out_windows_fill_each_others_gaps() -> None:
    assert spaced_offsets(0, 4, 105, 5).tolist() == [0, 25, 50, 75]
    together = sorted(offset for index in range(4) for offset in spaced_offsets(index, 5, 105, 5).tolist())
    assert together == list(range(0, 100, 5))


@pytest.mark.parametrize(
    ("counts", "nats"), [([1, 1, 1, 1], math.log(4)), ([5, 0, 0], 0.0), ([3, 1], 2 * math.log(2) - 0.75 * math.log(3))]
)
def test_unigram_loss_is_the_entropy_in_nats(counts: list[int], nats: float) -> None:
    assert unigram_loss(counts) == pytest.approx(nats)


def test_unigram_loss_of_nothing_is_refused() -> None:
    with pytest.raises(UserError, match="at least one token"):
        unigram_loss([0, 0])
