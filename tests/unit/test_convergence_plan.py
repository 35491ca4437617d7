"""The plan of the convergence benchmark, and which rows it still needs."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
from convergence.jobs import chosen_arms
from convergence.plan import Cell, PlannedArm, choose_groups, parse_plan, read_plan
from convergence.sweep import Phase, best_rate, due_cells, remaining_cells, sweep_rates
from pipeline_bench.speedrun import ENTRANTS

from protocol.errors import ConfigError, UserError

ROOT = Path(__file__).resolve().parents[2]

PLAN: dict[str, Any] = {
    "groups": {
        "small": {
            "seeds": [4, 5],
            "learning_rates": [2e-3, 1e-3],
            "horizons": [30, 60],
            "base": {"model": {"dim": 64, "layers": 4}, "train.warmup_steps": 5},
            "arms": [
                {"name": "dense", "role": "dense", "overrides": {"boundary.form": "none"}},
                {"name": "narrow", "overrides": {"boundary": {"rank": 8}}, "horizons": [30]},
            ],
        }
    }
}


def plan_with(**group: Any) -> dict[str, Any]:
    values = copy.deepcopy(PLAN)
    values["groups"]["small"] |= group
    return values


def small_arm(**group: Any) -> PlannedArm:
    return parse_plan(plan_with(**group), "plan.toml")["small"][0]


def test_an_arm_is_its_group_with_overrides_dotted_or_nested() -> None:
    dense, narrow = parse_plan(PLAN, "plan.toml")["small"]
    config = dense.config(Cell(1e-3, 5, 60))
    assert (config.model.dim, config.model.layers, config.train.warmup_steps) == (64, 4, 5)
    assert (config.boundary.form, config.train.learning_rate, config.seed, config.train.steps) == ("none", 1e-3, 5, 60)
    assert narrow.base_config().boundary.rank == 8
    assert (dense.horizons, narrow.horizons) == ((30, 60), (30,))
    assert dense.learning_rates == (1e-3, 2e-3)


@pytest.mark.parametrize(
    ("arm", "message"),
    [
        ({"name": "odd", "overrides": {"model.dimm": 3}}, r"group small, arm odd.*did you mean 'dim'"),
        ({"name": "odd", "overrides": {"boundary.rank": 65}}, "group small, arm odd.*at most model.dim = 64"),
        ({"name": "odd", "horizons": [30, 4], "overrides": {"boundary.rank": 2}}, "arm odd.*warmup_steps below"),
        ({"name": "odd", "overrides": {"train.steps": 9}}, "arm odd: train.steps comes from the plan's horizons"),
        ({"name": "dense", "overrides": {"boundary.rank": 2}}, "expected names of arms to differ, got dense twice"),
        ({"name": "again", "overrides": {"boundary": {"rank": 8}}}, "narrow and again are the same run"),
        ({"name": "odd", "rates": [1.0]}, "rates: Extra inputs"),
        (
            {"name": "odd", "overrides": {"model.family": "vit", "data.source": "digits"}},
            "group small, arm odd: expected a data.source of text, got 'digits': remove the arm",
        ),
        (
            {"name": "odd", "overrides": {"boundary": {"basis": "file", "basis_path": "u.npy"}}},
            'arm odd: expected boundary.basis = "random", got "file": a given basis is not in a row',
        ),
        (
            {"name": "odd", "overrides": {"boundary": {"form": "reparam", "basis": "moving"}}},
            'arm odd: expected boundary.basis = "random", got "moving": .*are not counted; remove the arm',
        ),
    ],
)
def test_an_arm_that_cannot_be_run_is_refused_by_name(arm: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_plan(plan_with(arms=[*PLAN["groups"]["small"]["arms"], arm]), "plan.toml")


def test_groups_and_arms_are_chosen_by_name() -> None:
    plan = parse_plan(PLAN, "plan.toml")
    assert [arm.name for arm in chosen_arms(choose_groups(plan, "small"), "d*")] == ["dense"]
    assert [arm.name for arm in chosen_arms(plan, "small/*")] == ["dense", "narrow"]
    with pytest.raises(ConfigError, match="did you mean small"):
        choose_groups(plan, "smal")
    with pytest.raises(UserError, match="expected --only to fit an arm of small/dense, small/narrow, got x"):
        chosen_arms(plan, "x")


def test_the_plan_of_this_repository_is_valid() -> None:
    groups = read_plan(ROOT / "scripts" / "convergence" / "plan.toml")
    assert all(any(arm.role == "dense" for arm in arms) for arms in groups.values())


def test_the_arm_that_stands_for_the_public_form_is_trained_as_that_is() -> None:
    """As the records of PluralisResearch/ProtocolNanoGPT: matrices by Muon, d / k = 6.4 in bfloat16, one embedding.

    The speedrun's table names the same arm.
    """
    arms = [arm for arm in read_plan(ROOT / "scripts" / "convergence" / "plan.toml")["main"] if arm.role == "reparam"]
    assert [arm.name for arm in arms] == [entrant.arm for entrant in ENTRANTS if entrant.name == "reparam"]
    config = arms[0].base_config()
    assert config.train.optimizer == "muon" and not config.boundary.stage_embeddings
    assert (config.boundary.form, config.boundary.codec) == ("reparam", "bfloat16")
    assert config.model.dim / config.boundary.rank == 6.4


def train(arm: PlannedArm, loss_of: Any) -> list[tuple[Phase, Cell]]:
    """Every row in the order in which they become due, one at a time."""
    losses: dict[Cell, float] = {}
    order = []
    while due := due_cells(arm, losses):
        order.append(due[0])
        losses[due[0][1]] = loss_of(due[0][1])
    return order


def test_a_sweep_with_its_best_inside_goes_on_to_seeds_then_horizons() -> None:
    order = train(small_arm(learning_rates=[1e-3, 2e-3, 4e-3]), lambda cell: abs(cell.learning_rate - 2e-3))
    assert order == [
        *((Phase.SWEEP, Cell(rate, 4, 30)) for rate in (1e-3, 2e-3, 4e-3)),
        (Phase.SEEDS, Cell(2e-3, 5, 30)),
        *((Phase.HORIZONS, Cell(2e-3, seed, 60)) for seed in (4, 5)),
    ]


@pytest.mark.parametrize(
    ("best", "rates"),
    [
        (5e-4, [2.5e-4, 5e-4, 1e-3, 2e-3]),
        (1e-9, [2.5e-4, 5e-4, 1e-3, 2e-3]),  # two more on a side, then it stays at the edge
        (4e-3, [1e-3, 2e-3, 4e-3, 8e-3]),
        (1.0, [1e-3, 2e-3, 4e-3, 8e-3]),
    ],
)
def test_a_sweep_with_its_best_at_an_edge_goes_on_beyond_it(best: float, rates: list[float]) -> None:
    order = train(small_arm(), lambda cell: abs(math.log(cell.learning_rate / best)))
    sweep = [cell.learning_rate for phase, cell in order if phase == Phase.SWEEP]
    assert sorted(sweep) == rates
    assert {cell.learning_rate for phase, cell in order if phase != Phase.SWEEP} == {
        min(rates, key=lambda r: abs(math.log(r / best)))
    }


def test_an_arm_that_always_diverges_is_tried_lower_and_then_left() -> None:
    order = train(small_arm(), lambda cell: math.inf)
    assert [cell.learning_rate for _, cell in order] == [1e-3, 2e-3, 5e-4, 2.5e-4]


def test_rows_that_are_there_are_not_due_again_and_all_missing_ones_of_a_phase_are() -> None:
    arm = small_arm(learning_rates=[1e-3, 2e-3, 4e-3])
    sweep = {Cell(1e-3, 4, 30): 2.0, Cell(4e-3, 4, 30): 3.0}
    assert due_cells(arm, sweep) == [(Phase.SWEEP, Cell(2e-3, 4, 30))]
    assert best_rate(arm, sweep) is None
    assert len(remaining_cells(arm, sweep)) == 4
    sweep[Cell(2e-3, 4, 30)] = 1.0
    assert [cell for _, cell in due_cells(arm, sweep)] == [Cell(2e-3, 5, 30), Cell(2e-3, 4, 60), Cell(2e-3, 5, 60)]
    assert best_rate(arm, sweep) == 2e-3
    assert sweep_rates(arm, sweep) == [1e-3, 2e-3, 4e-3]
