"""The lines of the peers in a laboratory, as its file declares them, for the floor of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from peers.lab.access import BYTES_PER_SECOND
from peers.lab.lab_file import read_lab
from protocol.floor import LinkFacts, Source


def declared_lines(path: Path) -> Callable[[Sequence[str]], LinkFacts | None]:
    """Gives the line of the peer at some addresses; None: they are not of the laboratory in `path`.

    Raises:
        ConfigError: `path` is no laboratory's file.
    """
    lab = read_lab(path)

    def line(addresses: Sequence[str]) -> LinkFacts | None:
        home = lab.home_of(addresses)
        if home is None:
            return None
        up, down = home.up_mbit * BYTES_PER_SECOND or None, home.down_mbit * BYTES_PER_SECOND or None
        return LinkFacts(up, down, home.delay_ms / 1e3, Source.DECLARED)

    return line
