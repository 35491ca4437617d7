"""The homes of an arm inside the laboratory: a peer's for each stage, and the coordinator's for one more."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from peers.lab.lab_file import COORDINATOR, LabFile, Place, parse_lab
from peers.lab.laboratory import Laboratory
from pipeline_bench.cases import Link
from pipeline_bench.homes import Traffic, detached


class LabHomes:
    """Homes behind `link`; the last one is the coordinator's.

    Raises:
        UserError: on entry, when this machine can have no laboratory.
    """

    def __init__(self, link: Link, homes: int) -> None:
        self._link, self._lab = link, Laboratory(lab_of(link), homes - 1)
        self._places: list[Place] = [*range(homes - 1), COORDINATOR]

    def __enter__(self) -> Self:
        self._lab.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lab.__exit__(kind, error, trace)

    def address(self, index: int) -> str:
        """See `Homes.address`."""
        return self._lab.address(self._places[index])

    def popen(self, index: int, argv: Sequence[str], log: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
        """See `Homes.popen`."""
        with log.open("ab") as file:
            return self._lab.popen(self._places[index], argv, **detached(file, environment))

    def lab_file(self, folder: Path) -> Path | None:
        """See `Homes.lab_file`."""
        lines = (f"{name} = {value}" for name, value in lab_values(self._link)["home"].items())
        file = folder / "lab.toml"
        file.write_text("\n".join(("[home]", *lines, "")))
        return file

    def traffic(self) -> Traffic:
        """What the hub has carried from and to each home."""
        homes = self._lab.counters()["homes"]
        return tuple((homes[str(place)]["up"]["bytes"], homes[str(place)]["down"]["bytes"]) for place in self._places)


def lab_of(link: Link) -> LabFile:
    """The laboratory in which every home has `link`."""
    return parse_lab(lab_values(link), f"link {link.name}")


def lab_values(link: Link) -> dict[str, dict[str, float]]:
    """The same as a laboratory's file says it: half of the delay is on each side of the hub."""
    rate = link.mbit or 0.0
    # What can wait at an end of the line: a round trip's worth, and a little more, as in labs/home-*.toml.
    buffer = max(1024, int(rate * 12.8))
    return {"home": {"up_mbit": rate, "down_mbit": rate, "delay_ms": link.delay_ms / 2, "buffer_kib": buffer}}
