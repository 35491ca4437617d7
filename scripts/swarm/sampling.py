"""What a process holds of the machine, from /proc, and what a peer says that it keeps."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

FIGURES = {
    "rss": "MiB resident",
    "p2pd": "MiB resident in its p2pd",
    "files": "open files",
    "sockets": "open sockets",
    "threads": "threads",
    "frames": "frames in the links' queues",
    "tensors": "tensors kept for neighbours",
    "blobs": "blobs kept or fetched",
    "early": "messages held for later",
    "reports": "reports kept for the coordinator",
}
LOAD_FILE = "load.json"
_PAGE = 4096 / (1 << 20)


def sample(pid: int, home: Path) -> dict[str, float]:
    """The figures of the process and of the daemon whose folder is `home`; empty if it is gone."""
    try:
        found = {"rss": _resident(pid), "threads": float(len(list(Path(f"/proc/{pid}/task").iterdir())))}
        links = _open_files(pid)
    except OSError:
        return {}
    found |= {"files": float(len(links)), "sockets": float(sum(link.startswith("socket:") for link in links))}
    with suppress(OSError, ValueError, KeyError, TypeError):
        found["p2pd"] = _resident(json.loads((home / "daemon.json").read_text())["p2pd"])
    with suppress(OSError, ValueError):
        found |= {name: float(value) for name, value in json.loads((home / LOAD_FILE).read_text()).items()}
    return found


def _resident(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE


def _open_files(pid: int) -> list[str]:
    links = []
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            links.append(str(file.readlink()))
    return links


def newest_step(metrics: Path) -> int:
    """The step of the last whole line; 0 if there is none. Reads the end of the file only."""
    with suppress(OSError), metrics.open("rb") as file:
        file.seek(max(0, file.seek(0, 2) - 8192))
        for line in reversed(file.read().splitlines()):
            with suppress(ValueError, KeyError, TypeError):
                return int(json.loads(line)["step"])
    return 0
