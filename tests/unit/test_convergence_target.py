"""Steps to a target loss."""

from __future__ import annotations

import math

import pytest
from convergence.target import Missed, Reached, over_seeds, steps_to


def test_between_two_lengths_the_loss_is_linear_in_the_logarithm_of_the_steps() -> None:
    outcome = steps_to(3.0, {100: 4.0, 400: 2.0, 1600: 1.0})
    assert isinstance(outcome, Reached)
    assert outcome.steps == pytest.approx(200)
    assert steps_to(2.0, {100: 4.0, 400: 2.0}) == Reached(pytest.approx(400))


def test_nothing_is_said_beyond_the_lengths_that_were_trained() -> None:
    assert steps_to(5.0, {200: 3.0, 100: 4.0}) == Reached(100, at_most=True)
    assert steps_to(1.0, {200: 3.0, 100: 4.0}) == Missed(200, 2.0)


def test_a_run_that_diverged_is_not_interpolated_from() -> None:
    assert steps_to(3.0, {100: math.inf, 200: 2.0}) == Reached(pytest.approx(200))


def test_over_seeds_the_mean_needs_all_of_them() -> None:
    every = over_seeds([Reached(100), Reached(120, at_most=True)])
    assert (every.mean, every.spread, every.at_most) == (110, pytest.approx(math.sqrt(200)), True)
    assert str(every) == "≤ 110 ± 14"
    some = over_seeds([Reached(100), Missed(200, 0.5)])
    assert some.mean is None
    assert str(some) == "not within 200 (1 of 2 seeds): +0.500 nats"
    assert str(over_seeds([Reached(1234.4)])) == "1,234"
