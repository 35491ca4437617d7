"""What a swarm must not leave behind: processes, sockets, temporary files."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path


def traces(mark: str, sockets: Iterable[Path], root: Path) -> list[str]:
    """What is left of the swarm with this mark, these sockets and this folder, in words."""
    return [*_processes(mark), *_zombies(), *_sockets(sockets), *_files(root)]


def _processes(mark: str) -> list[str]:
    """Those that were started with the mark in their environment, p2pd among them."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark.encode() in (process / "environ").read_bytes():
                found.append(f"process {process.name} ({(process / 'comm').read_text().strip()}) still runs")
    return found


def _zombies() -> list[str]:
    """Dead children of this process that nobody has asked after."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            state, parent = (process / "stat").read_text().rsplit(")", 1)[1].split()[:2]
            if state == "Z" and int(parent) == os.getpid():
                found.append(f"process {process.name} is a zombie")
    return found


def _sockets(sockets: Iterable[Path]) -> list[str]:
    return [f"socket {path} is left" for path in sorted(sockets) if path.exists()]


def _files(root: Path) -> list[str]:
    return [f"temporary file {path.relative_to(root)} is left" for path in sorted(root.rglob(".*.tmp"))]
