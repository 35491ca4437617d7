"""A run's data on this machine, text or images: what peers, verification and evaluation ask of it."""

from __future__ import annotations

from typing import Protocol

from protocol.config import RunConfig
from protocol.samples import Ints


class RunData(Protocol):
    """Microbatches `[B, N]` of integers, as `protocol.task` explains them."""

    @property
    def fingerprint(self) -> str:
        """SHA-256 of all of it; the same on every peer of a run."""

    @property
    def unigram_loss(self) -> float:
        """Nats per target of a model that knows only how often each target occurs."""

    def microbatch(self, config: RunConfig, step: int, index: int) -> Ints:
        """Microbatch `index` of `step`: a function of the run's seed and these two."""

    def held_out_microbatches(self, config: RunConfig) -> list[Ints]:
        """What is never trained on, or a fixed part of it, in microbatches of at most B.

        Raises:
            UserError: the data is too small to have any.
        """
