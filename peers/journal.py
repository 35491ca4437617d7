"""What the coordinator decided, when and why: a line each in `events.jsonl`, and on the screen."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from peers.run_folder import RunFolder, append_lines

logger = logging.getLogger(__name__)


class Journal:
    """Writes the lines; `show` tells a person. A disk that is full costs the lines, not the run."""

    def __init__(self, folder: RunFolder, show: Callable[[str], None]) -> None:
        self._folder, self._show = folder, show
        self._failing = False

    def note(self, kind: str, text: str, show: bool = True, **fields: Any) -> None:
        """Note a decision.

        Args:
            kind: view, notice, join, turned_away, released, failed, end, takeover, changed, rate or
                mistake.
        """
        if show:
            self._show(text)
        if not self._folder.exists():
            return
        try:
            append_lines(self._folder.events, [{"time": time.time(), "kind": kind, "text": text, **fields}])
            self._failing = False
        except OSError as error:
            if not self._failing:
                logger.error("%s cannot be written: %s; the run goes on", self._folder.events, error)
            self._failing = True
