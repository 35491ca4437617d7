"""The plan: which arms are trained, in groups that share a base configuration. Pure.

group = base configuration, seeds, learning rates, horizons (steps)
  arm = name, overrides of the base, a role, perhaps learning rates and horizons of its own
    cell = (learning rate, seed, steps)    with its arm a full RunConfig, whose hash is the key of its row
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from peers.config_file import read_toml
from protocol.config import RunConfig, parse_config
from protocol.errors import ConfigError
from protocol.task import IMAGE_SOURCES

_SET_BY_CELLS = {"seed": "seeds", "train.learning_rate": "learning_rates", "train.steps": "horizons"}


class _Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Arm(_Table):
    """One choice, to be compared with the others of its group."""

    name: str = Field(min_length=1, description="unique in its group")
    description: str = Field("", description="one line for the tables")
    role: Literal["dense", "reparam", "arm"] = Field(
        "arm",
        description="dense: the best of these sets the target; reparam: the public form, whose time is compared too",
    )
    overrides: dict[str, Any] = Field(default_factory=dict, description="keys of a run's TOML, dotted or nested")
    learning_rates: tuple[float, ...] | None = Field(None, min_length=1, description="instead of the group's")
    horizons: tuple[int, ...] | None = Field(None, min_length=1, description="instead of the group's")
    seeds: tuple[int, ...] | None = Field(None, min_length=1, description="instead of the group's")


class Group(_Table):
    """Arms that are compared with one another."""

    description: str = Field("", description="one line for the tables")
    seeds: tuple[int, ...] = Field(min_length=1, description="the first is that of the learning-rate sweep")
    learning_rates: tuple[float, ...] = Field(min_length=1, description="the sweep of each arm")
    horizons: tuple[int, ...] = Field(min_length=1, description="steps of a run; the first is that of the sweep")
    extensions: int = Field(2, ge=0, description="how often a sweep may go on by a factor of 2, on each side")
    base: dict[str, Any] = Field(default_factory=dict, description="keys of a run's TOML, dotted or nested")
    arms: tuple[Arm, ...] = Field(min_length=1)


class Plan(_Table):
    """All groups, by name."""

    groups: dict[str, Group] = Field(min_length=1)


@dataclass(frozen=True, slots=True, order=True)
class Cell:
    """What tells the rows of one arm apart."""

    learning_rate: float
    seed: int
    steps: int


@dataclass(frozen=True, slots=True)
class PlannedArm:
    """An arm with all that it takes from its group."""

    group: str
    name: str
    description: str
    role: str
    learning_rates: tuple[float, ...]
    seeds: tuple[int, ...]
    horizons: tuple[int, ...]
    extensions: int
    values: dict[str, Any]

    def config(self, cell: Cell) -> RunConfig:
        """The run of `cell`.

        Raises:
            ConfigError: not a run; the message names group and arm.
        """
        own = {
            "name": "convergence",
            "seed": cell.seed,
            "train": {"learning_rate": cell.learning_rate, "steps": cell.steps},
        }
        return parse_config(_merged(self.values, own), f"plan, group {self.group}, arm {self.name}")

    def base_config(self) -> RunConfig:
        """The run of the first learning rate, seed and horizon."""
        return self.config(Cell(self.learning_rates[0], self.seeds[0], self.horizons[0]))


def read_plan(path: Path) -> dict[str, list[PlannedArm]]:
    """The arms in the TOML file at `path`, by group; see `parse_plan`.

    Raises:
        ConfigError: no such file, not TOML, or not a plan.
    """
    return parse_plan(read_toml(path, "a plan"), str(path))


def parse_plan(values: dict[str, Any], origin: str) -> dict[str, list[PlannedArm]]:
    """The arms of each group, each checked to be a run at every planned cell.

    Raises:
        ConfigError: an unknown key, two arms of one name, or an arm that is not a run.
    """
    try:
        plan = Plan.model_validate(values)
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise ConfigError(f"{origin}: {problems}") from error
    groups = {name: [_planned(name, group, arm) for arm in group.arms] for name, group in plan.groups.items()}
    for name, arms in groups.items():
        _check(name, arms)
    return groups


def choose_groups(plan: dict[str, list[PlannedArm]], group: str | None) -> dict[str, list[PlannedArm]]:
    """The group of that name alone; all for None.

    Raises:
        ConfigError: there is no such group.
    """
    if group is None:
        return plan
    if group not in plan:
        close = difflib.get_close_matches(group, plan, n=1)
        hint = f"did you mean {close[0]}?" if close else f"choose one of {', '.join(plan)}"
        raise ConfigError(f"expected a group of the plan, got {group}: {hint}")
    return {group: plan[group]}


def _planned(name: str, group: Group, arm: Arm) -> PlannedArm:
    where = f"plan, group {name}, arm {arm.name}"
    values = _merged(_nested(group.base, where), _nested(arm.overrides, where))
    for key, field in _SET_BY_CELLS.items():
        if _holds(values, key.split(".")):
            raise ConfigError(f"{where}: {key} comes from the plan's {field}: remove it from base and overrides")
    return PlannedArm(
        group=name,
        name=arm.name,
        description=arm.description,
        role=arm.role,
        learning_rates=tuple(sorted(set(arm.learning_rates or group.learning_rates))),
        seeds=tuple(dict.fromkeys(arm.seeds or group.seeds)),
        horizons=tuple(dict.fromkeys(arm.horizons or group.horizons)),
        extensions=group.extensions,
        values=values,
    )


def _check(group: str, arms: Sequence[PlannedArm]) -> None:
    names = [arm.name for arm in arms]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"plan, group {group}: expected names of arms to differ, got {', '.join(twice)} twice")
    keys: dict[str, str] = {}
    for arm in arms:
        _check_trainable(arm)
        for steps in arm.horizons:
            arm.config(Cell(arm.learning_rates[0], arm.seeds[0], steps))
        other = keys.setdefault(arm.config(Cell(1e-3, 0, arm.horizons[0])).hash(), arm.name)
        if other != arm.name:
            raise ConfigError(f"plan, group {group}: the arms {other} and {arm.name} are the same run: remove one")


def _check_trainable(arm: PlannedArm) -> None:
    """Arms are trained on text, a row is its configuration, and bytes are those of coordinates and ids."""
    config, where = arm.base_config(), f"plan, group {arm.group}, arm {arm.name}"
    if config.data.source in IMAGE_SOURCES:
        raise ConfigError(f"{where}: expected a data.source of text, got {config.data.source!r}: remove the arm")
    if config.boundary.basis != "random":
        raise ConfigError(
            f'{where}: expected boundary.basis = "random", got "{config.boundary.basis}": a given basis is not in a '
            "row, and the bytes of a moving one are not counted; remove the arm"
        )


def _nested(values: dict[str, Any], where: str) -> dict[str, Any]:
    """`values` with dotted keys such as "model.dim" as tables in tables."""
    result: dict[str, Any] = {}
    for key, value in values.items():
        *tables, last = key.split(".")
        inner: Any = _nested(value, where) if isinstance(value, dict) else value
        for part in (last, *reversed(tables)):
            inner = {part: inner}
        result = _merged(result, inner)
    return result


def _merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`over` on top of `base`, tables merged."""
    result = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = _merged(result[key], value) if both else value
    return result


def _holds(values: Any, path: list[str]) -> bool:
    for part in path:
        if not isinstance(values, dict) or part not in values:
            return False
        values = values[part]
    return True
