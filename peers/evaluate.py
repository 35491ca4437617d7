"""The evaluation at a run's end: all stages' last checkpoints in one process, on data that was never trained on.

Only `launch` can do it, where every peer's folder is on this machine. It is bounded: a model too large for one process
is left alone, with the reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from peers.checkpoints import Checkpoints
from peers.data.run_data import RunData
from protocol.config import RunConfig
from protocol.errors import RunFailed
from protocol.lineage import Lineage
from protocol.reference import Evaluation, ReferenceRun

MOST_STATE_BYTES = 2 << 30  # weights and moments; about twice that is in memory while a stage is loaded
MOST_WORK = 5e12  # parameters x positions: about a minute on two cores


def evaluate(
    config: RunConfig,
    run_id: str,
    step: int,
    folders: Sequence[Path],
    data: RunData,
    basis_DK: torch.Tensor | None = None,
    lineage: Lineage | None = None,
) -> Evaluation:
    """The model after `step`, on the held-out data.

    Args:
        folders: those of the peers, with their checkpoints.
        basis_DK: of a run with `boundary.basis = "file"`.
        lineage: the run's history; checkpoints of another one are passed over.

    Raises:
        RunFailed: a stage has no checkpoint of `step` there, or the model is too large for this.
        UserError: the data is too small to have a held-out part.
    """
    microbatches = data.held_out_microbatches(config)
    holders = _holders(config, run_id, step, folders, lineage)
    size = sum(holder.size(stage, step) for stage, holder in enumerate(holders))
    parameters = sum(holder.parameters(stage, step) for stage, holder in enumerate(holders))
    _check_size(size, parameters * sum(map(len, microbatches)) * config.task.positions)
    model = ReferenceRun(config, basis_DK)
    for stage, holder in enumerate(holders):
        model.load(stage, holder.load(stage, step), step)
    return model.evaluate(microbatches)


def _holders(
    config: RunConfig, run_id: str, step: int, folders: Sequence[Path], lineage: Lineage | None
) -> list[Checkpoints]:
    """For each stage the checkpoints among which that of `step` is."""
    found: dict[int, Checkpoints] = {}
    for folder in folders:
        checkpoints = Checkpoints(folder / "checkpoints", run_id, config.checkpoint.keep, lineage=lineage)
        found |= {stage: checkpoints for stage, steps in checkpoints.held().items() if step in steps}
    missing = sorted(set(range(config.pipeline.stages)) - set(found))
    if missing:
        raise RunFailed(f"expected a checkpoint of step {step} of every stage, found none of {missing}")
    return [found[stage] for stage in range(config.pipeline.stages)]


def _check_size(state_bytes: int, work: float) -> None:
    if state_bytes > MOST_STATE_BYTES or work > MOST_WORK:
        raise RunFailed(
            f"expected checkpoints of at most {MOST_STATE_BYTES:,} bytes and {MOST_WORK:.0e} parameters x positions, "
            f"got {state_bytes:,} bytes and {work:.1e}: the model is too large for one process"
        )
