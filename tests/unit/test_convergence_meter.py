"""The meter against cases worked out by hand, and against the published step times."""

from __future__ import annotations

import pytest
from convergence.meter import Link, Pipeline, steady_step, step_ends, work_order
from convergence.public_case import RUNS

INSTANT = Link(1e12, 0.0)


def spelled(stage: int, stages: int, microbatches: int) -> str:
    return " ".join(f"{kind}{m}" for kind, m in work_order(stage, stages, microbatches))


def test_the_work_order_is_1f1b() -> None:
    assert spelled(0, 3, 4) == "F0 F1 F2 B0 F3 B1 B2 B3"
    assert spelled(1, 3, 4) == "F0 F1 B0 F2 B1 F3 B2 B3"
    assert spelled(2, 3, 4) == "F0 B0 F1 B1 F2 B2 F3 B3"
    assert spelled(0, 3, 2) == "F0 F1 B0 B1"


def test_one_message_each_way() -> None:
    """F at 0..1, lands at 1 + 1 + 0.5; F, B at 2.5..5.5; lands at 5.5 + 2 + 0.5; B at 8..10."""
    pipeline = Pipeline(stages=2, microbatches=1, forward_seconds=1.0, forward_bits=10, backward_bits=20)
    assert step_ends(pipeline, Link(10, 0.5), 3) == pytest.approx([10.0, 20.0, 30.0])


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 3), (2, 2), (4, 8), (8, 4)])
def test_without_a_wire_it_is_the_pipelines_bubble(stages: int, microbatches: int) -> None:
    pipeline = Pipeline(stages, microbatches, forward_seconds=1.0, forward_bits=0, backward_bits=0)
    assert steady_step(pipeline, INSTANT) == pytest.approx(3 * (microbatches + stages - 1))


def test_both_directions_share_the_middle_stages_wire() -> None:
    """No compute, a message takes 1. Landings at stage 1: F0 1, F1 2, B0 3, F2 4, B1 5, B2 6; at stage 0: 4, 6, 7.

    With a wire for each direction F2 lands at 3, and the step takes 6.
    """
    pipeline = Pipeline(stages=3, microbatches=3, forward_seconds=0.0, forward_bits=1, backward_bits=1)
    assert steady_step(pipeline, Link(1, 0.0)) == pytest.approx(7.0)


def test_latency_holds_the_wire() -> None:
    """Both forwards are sent at 0 and land at 1 and 2; the gradients are sent then, and land at 2 and 3."""
    pipeline = Pipeline(stages=2, microbatches=2, forward_seconds=0.0, forward_bits=0, backward_bits=0)
    assert steady_step(pipeline, Link(1, 1.0)) == pytest.approx(3.0)


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_it_tells_the_published_step_times(run: object) -> None:
    assert run.metered() == pytest.approx(run.step_seconds, rel=2e-4)  # type: ignore[attr-defined]
