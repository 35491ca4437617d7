"""Where a peer is of most use, and when moving one is worth it; what a stage costs; shares by speed."""

from __future__ import annotations

import math

import pytest

from protocol.config import RunConfig, parse_config
from protocol.model.stage import Stage
from protocol.pace import MOST_MARGIN_STEPS, Pace
from protocol.placement import Worker, better_place, fits, neediest, speeds, substitute, times
from protocol.shares import SMALLEST, better_shares, shares, smoothed, stage_seconds
from protocol.stage_cost import StageCost, parameters, stage_costs

EQUAL = (StageCost(6.0), StageCost(6.0), StageCost(6.0))


def workers(*counts: int, speed: float = 1.0, memory: int = 0) -> list[Worker]:
    """So many peers at each stage."""
    return [Worker(f"s{s}p{n}", s, speed, memory) for s, count in enumerate(counts) for n in range(count)]


# Placement


def test_a_stage_takes_its_cost_over_its_replicas_speed() -> None:
    assert times(EQUAL, workers(1, 2, 0)) == [6, 3, math.inf]


def test_the_neediest_stage_is_the_slowest_that_fits() -> None:
    costs = (StageCost(6.0, 10), StageCost(6.0, 20), StageCost(30.0, 50))
    assert neediest(costs, workers(1, 1, 1), memory=0) == 2
    assert neediest(costs, workers(1, 1, 1), memory=30) == 0
    assert neediest(costs, workers(2, 1, 1), memory=30) == 1
    assert neediest(costs, [], memory=9) is None
    assert fits(costs[2], 0) and not fits(costs[2], 49)


def test_a_peer_moves_where_that_pays() -> None:
    move = better_place(EQUAL, workers(3, 1, 3))
    assert move is not None and (move.stage, move.peer) == (1, "s0p0")
    assert "stage 1 holds the run up at 6 s a microbatch" in move.reason


@pytest.mark.parametrize(
    ("counts", "why"),
    [
        ((2, 2, 2), "all alike"),
        ((1, 1, 1), "nobody to spare"),
        ((2, 1, 2), "the giving stage would be as slow as the other was"),
        ((7, 6, 7), "a gain of a seventh is not enough"),
    ],
)
def test_a_peer_stays_where_a_move_does_not_pay(counts: tuple[int, ...], why: str) -> None:
    assert better_place(EQUAL, workers(*counts)) is None, why


def test_who_is_on_its_way_or_too_small_is_not_moved() -> None:
    assert better_place(EQUAL, [Worker(w.peer, w.stage, 1.0, movable=False) for w in workers(3, 1, 3)]) is None
    costs = (StageCost(6.0, 1), StageCost(6.0, 9), StageCost(6.0, 1))
    assert better_place(costs, workers(3, 1, 3, memory=5)) is None


def test_a_move_does_not_call_for_the_next() -> None:
    found = workers(3, 1, 3)
    move = better_place(EQUAL, found)
    assert move is not None
    after = [Worker(w.peer, move.stage if w.peer == move.peer else w.stage, 1.0) for w in found]
    assert better_place(EQUAL, after) is None


def test_a_substitute_leaves_the_run_fastest_and_no_stage_without() -> None:
    slow = [Worker("slow", 0, 1.0), Worker("fast", 0, 4.0), Worker("last", 1, 1.0), Worker("lone", 2, 9.0)]
    found = substitute(EQUAL, slow, 1)
    assert found is not None and found.peer == "slow"
    assert substitute(EQUAL, workers(1, 1, 1), 1) is None


def test_speeds_are_measured_where_they_can_be() -> None:
    declared = {"ann": 100.0, "ben": 200.0, "cat": 0.0, "dan": 50.0}
    found = speeds(declared, {"ann": 0.1, "ben": None, "dan": None}, {"ann": 2.0, "ben": 2.0})
    assert found["ann"] == pytest.approx(20.0), "done: 2 GFLOP in 0.1 s"
    assert found["ben"] == pytest.approx(40.0) and found["dan"] == pytest.approx(10.0), "a fifth of what they declare"
    assert found["cat"] == pytest.approx(20.0), "the usual"
    assert speeds({"ann": 0.0, "ben": 0.0}, {}, {}) == {"ann": 1.0, "ben": 1.0}


# Shares


def test_shares_are_inverse_to_seconds_and_bounded() -> None:
    assert shares({"ann": 1.0, "ben": 2.0, "cat": 100.0}) == {"ann": 1, "ben": 0.5, "cat": SMALLEST}
    assert shares({"ann": None, "ben": None}) == {"ann": 1, "ben": 1}
    assert shares({"ann": 1.0, "ben": 3.0, "new": None})["new"] == 0.5


def test_better_shares_make_all_replicas_busy_alike() -> None:
    seconds = {"ann": 1.0, "ben": 2.0}
    better = better_shares({"ann": 1, "ben": 1}, seconds)
    assert better is not None and better == {"ann": 1, "ben": 0.5}
    assert stage_seconds(better, seconds) == pytest.approx(2 / 3)
    assert better_shares(better, seconds) is None


def test_shares_change_for_no_small_gain_and_no_unknown_speed() -> None:
    assert better_shares({"ann": 1, "ben": 1}, {"ann": 1.0, "ben": 1.2}) is None
    assert better_shares({"ann": 1, "ben": 1}, {"ann": 1.0, "ben": None}) is None
    assert better_shares({"ann": 1}, {"ann": 1.0}) is None


def test_measurements_are_smoothed() -> None:
    assert smoothed(None, 3.0) == 3.0
    assert smoothed(1.0, 2.0) == pytest.approx(1.2)


# Pace


def test_the_pace_is_the_usual_step() -> None:
    pace = Pace()
    assert (pace.step_seconds, pace.margin) == (1.0, 2)
    for step in range(10):
        pace.note(step, step * 0.5)
    pace.note(10, 1000.0)
    pace.note(9, 1001.0)
    assert pace.step_seconds == pytest.approx(0.5) and pace.margin == 4
    pace.restart()
    pace.note(3, 2000.0)
    assert pace.step_seconds == pytest.approx(0.5), "what a pause took is no step's"


def test_a_margin_is_bounded() -> None:
    pace = Pace()
    pace.note(0, 0.0)
    pace.note(1000, 0.0)
    assert pace.margin == MOST_MARGIN_STEPS
    pace = Pace()
    pace.note(0, 0.0)
    pace.note(1, 500.0)
    assert pace.margin == 1


# Costs


def config(**sections: dict[str, object]) -> RunConfig:
    model = {"dim": 32, "layers": 6, "heads": 4, "kv_heads": 2, "hidden": 48}
    given = {"model": model | sections.pop("model", {}), "pipeline": {"stages": 3}, "data": {"vocab_size": 300}}
    return parse_config(given | sections, "test")


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"boundary": {"form": "reparam", "rank": 4}},
        {"boundary": {"form": "projected", "rank": 4, "stage_embeddings": False}},
        {"boundary": {"form": "none", "stage_embedding": "low_rank", "stage_embedding_size": 5}},
        {"boundary": {"stage_embedding": "bigram", "stage_embedding_size": 40}},
        {"model": {"family": "vit", "patch": 2}, "data": {"source": "digits"}},
    ],
    ids=str,
)
def test_numbers_are_counted_as_the_stages_have_them(sections: dict[str, dict[str, object]]) -> None:
    run = config(**sections)
    for stage in range(3):
        matrices = sum(p.numel() for p in Stage(run, stage).parameters() if p.dim() > 1)
        assert parameters(run, stage) == matrices


def test_the_last_stage_costs_its_head_and_a_longer_sequence_more_than_in_proportion() -> None:
    first, middle, last = stage_costs(config())
    assert last.gflop > middle.gflop >= first.gflop
    short, long = (stage_costs(config(train={"sequence_length": t}))[1].gflop for t in (512, 1024))
    assert 2 * short < long < 4 * short


def test_a_stage_of_matrices_alone_costs_six_operations_a_number_and_token() -> None:
    run = config(
        model={"dim": 512, "hidden": 2048},
        boundary={"rank": 1, "stage_embeddings": False, "fixed_embedding": False},
        train={"sequence_length": 16, "microbatch_size": 2},
    )
    expected = 6 * parameters(run, 1) * 32 / 1e9
    assert stage_costs(run)[1].gflop == pytest.approx(expected, rel=0.02)
    again = run.model_copy(update={"pipeline": run.pipeline.model_copy(update={"recompute": True})})
    assert stage_costs(again)[1].gflop == pytest.approx(expected * 4 / 3, rel=0.02)


def test_memory_holds_at_least_weights_gradients_and_moments_and_shrinks_with_recomputing() -> None:
    run = config()
    assert all(cost.memory > 16 * parameters(run, stage) for stage, cost in enumerate(stage_costs(run)))
    again = run.model_copy(update={"pipeline": run.pipeline.model_copy(update={"recompute": True})})
    assert stage_costs(again)[1].memory < stage_costs(run)[1].memory
