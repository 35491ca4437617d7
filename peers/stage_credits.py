"""A stage's credits with a clock: measured as `pipeline.credits` says, and a word where the window is too small."""

from __future__ import annotations

import logging
import time

from protocol.basis_microbatch import microbatches
from protocol.config import RunConfig
from protocol.credits import CreditMeter
from protocol.events import Arrived, CreditsChanged, Event
from protocol.view import View

logger = logging.getLogger(__name__)


class StageCredits:
    """Of `stage`, under whatever view."""

    def __init__(self, config: RunConfig, stage: int) -> None:
        self._config, self._stage = config, stage
        self._meter = CreditMeter(config.pipeline.window) if config.pipeline.credits == "measured" else None
        self._short = False  # in the last step

    def note(self, event: Event, step: int, view: View | None) -> CreditsChanged | None:
        """An event of the machine, while `step` is under way by `view`; what the machine is to hear before it."""
        if self._meter is None or (isinstance(event, Arrived) and not self._is_due(event, view)):
            return None
        credits = self._meter.note(event, step, time.monotonic())
        if credits is None:
            return None
        self._say_if_short(step)
        return CreditsChanged(credits)

    def _is_due(self, event: Arrived, view: View | None) -> bool:
        # The machine has not looked at it yet: a stranger's "gradients", sent at once, would tell of a short way.
        return view is not None and view.stage_of(event.peer) == self._stage + 1

    def _say_if_short(self, step: int) -> None:
        pipeline = self._config.pipeline
        binds = pipeline.schedule == "1f1b" and pipeline.window < microbatches(self._config, step)
        short = binds and self._meter is not None and self._meter.needed > pipeline.window
        if short and not self._short:
            logger.info(
                "stage %d needs more microbatches in flight than pipeline.window = %d to keep its links and the stages "
                "below busy: raise it if there is memory",
                *(self._stage, pipeline.window),
            )
        self._short = short
