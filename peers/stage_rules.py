"""What the step protocol must know of a run's configuration."""

from __future__ import annotations

from protocol.basis_microbatch import is_moving_step, microbatches
from protocol.blob import BlobKey, BlobKind
from protocol.config import RunConfig
from protocol.model.stage_sizes import stage_sizes
from protocol.place import Rules
from protocol.work import Schedule


def rules_of(config: RunConfig) -> Rules:
    """The run's rules for the step protocol."""

    def blob_bytes(key: BlobKey) -> int:
        sizes = stage_sizes(config, key.stage)
        if key.kind is BlobKind.STATE:
            return sizes.state_bytes
        return sizes.moving_part_bytes if is_moving_step(config, key.step) else sizes.part_bytes

    return Rules(
        microbatches=lambda step: microbatches(config, step),
        window=config.pipeline.window,
        blob_bytes=blob_bytes,
        copies=lambda step: config.checkpoint.copies if step % config.checkpoint.every == 0 else 0,
        schedule=Schedule(config.pipeline.schedule),
    )
