"""Where the processes of an arm live: a home each, behind a line of its own, or all on one loopback."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO, Protocol, Self

from pipeline_bench.cases import Link
from pipeline_bench.processes import MARK, parse_loopback

ROOT = Path(__file__).resolve().parents[2]


Traffic = tuple[tuple[int, int], ...]


class Homes(Protocol):
    """Homes 0, 1, ...: who lives in one reaches the others by their addresses."""

    def address(self, index: int) -> str:
        """The IPv4 address of a home."""

    def popen(self, index: int, argv: Sequence[str], log: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
        """Start a process there, in a session of its own; what it says goes to `log`."""

    def lab_file(self, folder: Path) -> Path | None:
        """The laboratory's file, written to `folder`; None without one."""

    def traffic(self) -> Traffic:
        """Bytes that each home has sent and received, headers of IP and TCP included."""


def detached(output: BinaryIO, environment: dict[str, str]) -> dict[str, Any]:
    """Options of `subprocess.Popen` for a process in a session of its own, which says all to `output`."""
    streams = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
    return {**streams, "env": environment, "start_new_session": True}


class Loopback:
    """All in one place, for trying things out: bytes are those of the whole machine's loopback."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def address(self, index: int) -> str:
        """The same for all."""
        return "127.0.0.1"

    def popen(self, index: int, argv: Sequence[str], log: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
        """See `Homes.popen`."""
        with log.open("ab") as file:
            return subprocess.Popen(argv, **detached(file, environment))

    def lab_file(self, folder: Path) -> Path | None:
        """There is none."""
        return None

    def traffic(self) -> Traffic:
        """All of it, as if of one home."""
        return (parse_loopback(Path("/proc/net/dev").read_text()),)


def environment(mark: str) -> dict[str, str]:
    """The environment of an arm's processes: this checkout's code, one thread each, the mark."""
    own = {
        "PYTHONPATH": f"{ROOT}:{ROOT / 'scripts'}",
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        MARK: mark,
    }
    return os.environ | own


def python(module: str, *arguments: str | Path) -> list[str]:
    """The command that runs `module`."""
    return [sys.executable, "-P", "-m", module, *map(str, arguments)]


def open_homes(stack: ExitStack, link: Link, homes: int, loopback: bool) -> Homes:
    """Homes behind `link`, until `stack` is closed.

    Raises:
        UserError: there is no laboratory here.
    """
    if loopback:
        return stack.enter_context(Loopback())
    from pipeline_bench.lab_homes import LabHomes

    return stack.enter_context(LabHomes(link, homes))
