"""How much a peer keeps in memory for others, in a file: for those who watch over hours that it stays bounded."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from peers.coordinator_line import CoordinatorLine
from peers.transport import Transport
from protocol.stage_machine import StageMachine

logger = logging.getLogger(__name__)


class LoadFile:
    """Writes the newest figures to `path`; None: nothing is written."""

    def __init__(self, path: Path | None, transport: Transport, line: CoordinatorLine) -> None:
        self._path, self._transport, self._line = path, transport, line

    def note(self, machine: StageMachine | None) -> None:
        """Write what `machine`, the links and the line to the coordinator keep now."""
        if self._path is None:
            return
        kept = {} if machine is None else machine.kept
        figures = {**kept, "frames": self._transport.queued(), "reports": self._line.kept}
        try:
            # Not by way of a temporary file: a reader that meets half a line reads again two seconds later.
            self._path.write_text(json.dumps(figures) + "\n")
        except OSError as error:
            logger.error("%s cannot be written: %s", self._path, error)
