"""The basis microbatch: how a moved basis reaches every stage, and all of them at the same step.

On a moving step the step has one microbatch more, the last. It carries no ids and no coordinates forward, and the new
basis backward:

    F_M   an empty payload, from the first stage to the last
    B_M   at the last stage: decide the new basis; then its d x k numbers, as they came, from stage to stage
    APPLY the update, and then the switch

So the basis is sent at least once and taken once, sent again when it is lost, and is there before APPLY, by the rules
that hold for every microbatch; the step protocol knows nothing of bases. Gradients are averaged over the others only.

The last stage decides by what it gathered in the steps that are *applied* since the last move, not in this one: with
replicas, these are what a reduction has made the same everywhere.
"""

from __future__ import annotations

from protocol.config import RunConfig
from protocol.frame import Kind


def is_moving_step(config: RunConfig, step: int) -> bool:
    """Whether the basis moves at the end of `step`."""
    return config.moves_basis and step % config.boundary.move_every == 0


def microbatches(config: RunConfig, step: int) -> int:
    """How many microbatches `step` has, the basis microbatch among them."""
    return config.train.microbatches + is_moving_step(config, step)


def is_basis_microbatch(config: RunConfig, step: int, microbatch: int) -> bool:
    """Whether this is the one that carries the basis."""
    return is_moving_step(config, step) and microbatch == config.train.microbatches


def basis_payload_bytes(config: RunConfig, kind: Kind) -> int:
    """The exact payload of the basis microbatch's frame of `kind`; 0 where the run's basis does not move."""
    return 4 * config.model.dim * config.boundary.rank if config.moves_basis and kind is Kind.BACKWARD else 0
