"""A laboratory that runs: namespaces, the hub between them, and programs inside.

    with Laboratory(read_lab(Path("labs/home-80.toml")), homes=4) as lab:
        server = lab.popen(1, ["python", "server.py", lab.address(1)])
        lab.run(0, ["ping", "-c", "3", lab.address(1)])
        lab.change(0, up_mbit=40)

Homes are numbered from 0; "coordinator" is one more. At the end, whatever still runs inside is ended, and all is
removed. What a killed laboratory left is removed when the next one opens.
"""

from __future__ import annotations

import json
import socket
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from peers.child_python import child_python
from peers.lab import namespaces
from peers.lab.device import largest_bundle
from peers.lab.forwarder import CONTROL
from peers.lab.lab_file import MOST_HOMES, LabFile, Place, address_at, places
from protocol.errors import RunFailed, UserError

_START_SECONDS = 30.0
_POLL_SECONDS = 0.02


class Laboratory:
    """A context manager.

    Raises:
        UserError: on entry, when this machine lacks what it needs; see `namespaces.why_not`.
        RunFailed: on entry, when the system refused something all the same.
    """

    def __init__(self, lab: LabFile, homes: int) -> None:
        if not 0 <= homes <= MOST_HOMES:
            raise UserError(f"expected at most {MOST_HOMES} homes in a laboratory, got {homes}")
        self.lab, self.homes = lab, homes
        self.number = 0
        self._held: namespaces.Number | None = None
        self._hub: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        namespaces.check_possible()
        namespaces.clean()
        self._held = namespaces.Number()
        self.number = self._held.value
        try:
            namespaces.make(self.number, list(places(self.homes)), largest_bundle(self.lab, self.homes))
            self._start_hub(self._held.folder)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End what runs inside and remove all. Can be called twice."""
        if self._held is None:
            return
        for place in places(self.homes):  # while the hub still carries their farewells
            namespaces.end_processes(self.namespace(place))
        if self._hub is not None:
            assert self._hub.stdin is not None
            self._hub.stdin.close()
            self._hub.wait()
            self._hub = None
        self._held.free()
        self._held = None

    def failure(self) -> str | None:
        """Why nothing gets from one home to another any more: the hub has ended."""
        if self._hub is None or self._held is None or self._hub.poll() is None:
            return None
        return f"the laboratory's hub ended: {_last_line(self._held.folder / 'hub.txt')}"

    def _start_hub(self, folder: Path) -> None:
        folder.mkdir(mode=0o700)
        spec = {"lab": self.lab.model_dump(exclude_unset=True), "homes": self.homes, "number": self.number}
        (folder / "spec.json").write_text(json.dumps(spec))
        with (folder / "hub.txt").open("wb") as log:
            self._hub = subprocess.Popen(
                child_python("peers.lab.forwarder", str(folder / "spec.json")),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,  # a Ctrl-C is not for it
            )
        deadline = time.monotonic() + _START_SECONDS
        while True:
            if self._hub.poll() is not None or time.monotonic() > deadline:
                raise RunFailed(f"the laboratory's hub did not start: {_last_line(folder / 'hub.txt')}")
            with suppress(OSError):
                self.counters()
                return
            time.sleep(_POLL_SECONDS)

    # What is where

    def namespace(self, place: Place) -> str:
        """The name of a home's network namespace."""
        return namespaces.namespace_at(self.number, place)

    def address(self, place: Place) -> str:
        """A home's IPv4 address."""
        return address_at(self.number, place)

    def prefix(self, place: Place) -> list[str]:
        """What to put before a command to run it in a home. It becomes the command: same process, same signals."""
        return ["ip", "netns", "exec", self.namespace(place)]

    # Programs

    def popen(self, place: Place, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a program in a home; `options` are those of `subprocess.Popen`."""
        return subprocess.Popen([*self.prefix(place), *command], **options)

    def run(self, place: Place, command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[Any]:
        """Run a program in a home to its end; `options` are those of `subprocess.run`."""
        return subprocess.run([*self.prefix(place), *command], **{"check": True, **options})

    # The lines

    def change(self, place: Place | str, **line: float) -> None:
        """Change a home's line from now on, or that of "all": `up_mbit`, `down_mbit`, `delay_ms`, `jitter_ms`, `loss`.

        Raises:
            UserError: no such home, or no such value.
        """
        change(self.number, place, line)

    def counters(self) -> dict[str, Any]:
        """What the hub has carried so far, IP headers included: {"homes": {place: {"up", "down", "refused"}},
        "cpu_seconds"}; `up` and `down` are `link_model.LinkCounters`."""
        return ask(self.number, {})


def change(number: int, place: Place | str, line: dict[str, float]) -> None:
    """Change a line of a laboratory that runs, maybe another process's.

    Raises:
        UserError: there is no such laboratory or home, or no such value.
    """
    try:
        answer = ask(number, {"home": place, "set": line})
    except OSError as error:
        raise UserError(f"expected the number of a laboratory that runs, got {number}: {error.strerror}") from error
    if "error" in answer:
        raise UserError(answer["error"])


def ask(number: int, request: dict[str, Any]) -> dict[str, Any]:
    """The answer of a laboratory's hub.

    Raises:
        OSError: it does not run.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(10.0)
        connection.connect(str(namespaces.folder_of(number) / CONTROL))
        connection.sendall(json.dumps(request).encode())
        parts = []
        while part := connection.recv(1 << 16):
            parts.append(part)
    answer: dict[str, Any] = json.loads(b"".join(parts))
    return answer


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip() if lines else "it said nothing"
