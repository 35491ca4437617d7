"""What the flat bytes of any stage hold, and how long they are, without building it (`protocol.model.flat`).

    state   weight/NAME, moment1/NAME, moment2/NAME, basis/...      sorted
    part    gradient/NAME, sorted; then, where the basis moves,
            pull     at the last stage: what the step has gathered
            basis    on a moving step: the new basis, from the one replica that handled the basis microbatch

All of it follows from the configuration.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from protocol.basis_microbatch import is_moving_step
from protocol.config import RunConfig
from protocol.model import flat, moving_basis
from protocol.model.stage import StageParameters, confined_axes, whole_model_names
from protocol.optimizer import state_shapes

GRADIENT, PULL, BASIS = "gradient/", "pull", "basis"


@dataclass(frozen=True, slots=True)
class StageSizes:
    """What a stage takes.

    Attributes:
        parameters: numbers that are trained.
        state_bytes: of its weights, moments and basis.
        part_bytes: of a replica's part of a step, and of the total.
        moving_part_bytes: the same of a step at whose end the basis moves; as `part_bytes` if it never does.
    """

    parameters: int
    state_bytes: int
    part_bytes: int
    moving_part_bytes: int


def stage_sizes(config: RunConfig, stage: int) -> StageSizes:
    """The sizes of `stage`; no tensor is made.

    Raises:
        ValueError: no such stage.
    """
    steps = (1, config.boundary.move_every if config.moves_basis else 1)  # a basis moves after two steps or more
    part, moving = (flat.size(part_layout(config, stage, step)) for step in steps)
    gradients = part_layout(config, stage, 1)
    parameters = flat.size({name: shape for name, shape in gradients.items() if name.startswith(GRADIENT)})
    return StageSizes(parameters // flat.NUMBER.itemsize, flat.size(state_layout(config, stage)), part, moving)


@lru_cache(maxsize=512)
def state_layout(config: RunConfig, stage: int) -> flat.Layout:
    """The state of `stage` as `StageEngine.state_bytes` has it.

    Raises:
        ValueError: no such stage.
    """
    built = _without_memory(config, stage)
    # Coordinates are confined by their width alone, and have a second moment for each number.
    axes = {} if built.holds_coordinates else confined_axes(built)
    shapes = state_shapes(_shapes(built), config.train, axes)
    if config.moves_basis:
        shapes |= moving_basis.state_shapes(config.model.dim, config.boundary.rank, built.is_last)
    return dict(sorted(shapes.items()))


def part_layout(config: RunConfig, stage: int, step: int) -> flat.Layout:
    """A replica's part of `step` as `StageEngine.part` has it.

    Raises:
        ValueError: no such stage.
    """
    return _part_layout(config, stage, is_moving_step(config, step))


@lru_cache(maxsize=512)
def _part_layout(config: RunConfig, stage: int, moves: bool) -> flat.Layout:
    built = _without_memory(config, stage)
    layout = {GRADIENT + name: shape for name, shape in sorted(_shapes(built).items())}
    basis = (config.model.dim, config.boundary.rank)
    if config.moves_basis and built.is_last:
        layout[PULL] = basis
    return layout | ({BASIS: basis} if moves else {})


def _without_memory(config: RunConfig, stage: int) -> StageParameters:
    with torch.device("meta"):
        return StageParameters(config, stage)


def _shapes(stage: StageParameters) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in whole_model_names(stage).items()}
