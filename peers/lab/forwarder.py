"""The hub: `python -m peers.lab.forwarder SPEC.json`, one process that holds the lines of all homes of a laboratory.

    home A's TUN --read--> A's line up --> hub --> B's line down --write--> home B's TUN

A packet waits in a heap until it is at the hub, then again until it is at the other home: packets from near and far
meet at B's line in the order in which they get there. Times are those of the model; when this process wakes late, and
it wakes by whole milliseconds, the packets that are due go at once, and the rate is kept.

Where no home has a rate, a delay, a loss or a NAT, the system may hand over bundles of segments up to 64 KiB (as
network cards do), else this process would be the limit; such a laboratory models nothing.

It ends when its standard input does: when its parent is gone. On a socket beside the spec it takes one JSON object a
connection, to change a line or to tell its counters.
"""

from __future__ import annotations

import fcntl
import heapq
import json
import os
import select
import socket
import struct
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from peers.lab.lab_file import Home, LabFile, Line, Place, address_at, parse_lab, places
from peers.lab.namespaces import DEVICE, MTU_BYTES, inside, namespace_at
from peers.lab.nat import Nat
from protocol.section import parse_section

CONTROL = "control.sock"
_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_IFF_TUN, _IFF_NO_PI, _IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
_TUN_F_CSUM, _TUN_F_TSO4 = 0x01, 0x02
_VNET_HEADER_BYTES = 10
_BATCH = 64  # packets from one home before the others have their turn
_BYTES_PER_SECOND = 1e6 / 8


class Port:
    """A home at the hub: its device, its line each way, and its NAT."""

    def __init__(self, place: Place, home: Home, number: int, seed: int, bundles: bool) -> None:
        self.place = place
        self.address = socket.inet_aton(address_at(number, place))
        self.device = _open_device(namespace_at(number, place), bundles)
        self.up, self.down = home.up(2 * seed), home.down(2 * seed + 1)
        self.nat = Nat() if home.nat else None
        self.refused = 0

    def change(self, line: dict[str, float]) -> None:
        """Change what `line` says, in the units of the file."""
        for model, rate in ((self.up, "up_mbit"), (self.down, "down_mbit")):
            if rate in line:
                model.bytes_per_second = line[rate] * _BYTES_PER_SECOND or None
            model.delay = line.get("delay_ms", model.delay * 1e3) / 1e3
            model.jitter = line.get("jitter_ms", model.jitter * 1e3) / 1e3
            model.loss = line.get("loss", model.loss)

    def counters(self) -> dict[str, Any]:
        """What went over its line."""
        return {"up": asdict(self.up.counters), "down": asdict(self.down.counters), "refused": self.refused}


class Forwarder:
    """Serves until the parent is gone."""

    def __init__(self, lab: LabFile, homes: int, number: int, control: Path) -> None:
        kinds = {place: lab.at(place) for place in places(homes)}
        self._bundles = not lab.changes and all(_is_open(home) for home in kinds.values())
        self._skip = _VNET_HEADER_BYTES if self._bundles else 0
        self._ports = {
            place: Port(place, home, number, lab.seed + index, self._bundles)
            for index, (place, home) in enumerate(kinds.items())
        }
        self._by_address = {port.address: port for port in self._ports.values()}
        start = time.monotonic()
        self._changes = sorted((start + change.after_seconds, change.home, change.line) for change in lab.changes)
        self._travelling: list[tuple[float, int, Port, bytes, bool]] = []  # due, number, whose, packet, whether home
        self._number = 0
        self._control = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._control.bind(str(control))
        self._control.listen()
        self._ended = False

    def run(self) -> None:
        """Carry packets."""
        handlers: dict[int, Callable[[], None]] = {0: self._end, self._control.fileno(): self._serve_control}
        for port in self._ports.values():
            handlers[port.device] = lambda port=port: self._read(port)  # type: ignore[misc]
        poll = select.epoll()
        for handle in handlers:
            poll.register(handle, select.EPOLLIN)
        while not self._ended:
            for handle, _ in poll.poll(self._seconds_to_next()):
                handlers[handle]()
            self._advance(time.monotonic())

    def _end(self) -> None:
        self._ended = True

    def _seconds_to_next(self) -> float:
        due = min((queue[0][0] for queue in (self._travelling, self._changes) if queue), default=None)
        return -1 if due is None else max(0.0, due - time.monotonic())

    # Packets

    def _read(self, port: Port) -> None:
        device, up, nat, skip, now = port.device, port.up, port.nat, self._skip, time.monotonic()
        size = 1 << 16 if skip else MTU_BYTES
        with suppress(BlockingIOError):
            for _ in range(_BATCH):
                packet = os.read(device, size + skip)
                if packet[skip] >> 4 != 4:  # IPv6 asks for its router by itself
                    continue
                if nat is not None:
                    nat.sent(packet, now)
                arrival = up.put(len(packet) - skip, now)
                if arrival is not None:
                    self._at_hub_later(arrival, now, packet)

    def _at_hub_later(self, arrival: float, now: float, packet: bytes) -> None:
        port = self._by_address.get(packet[16 + self._skip : 20 + self._skip])
        if port is None:
            return
        if arrival <= now:
            self._at_hub(arrival, now, port, packet)
        else:
            self._number += 1
            heapq.heappush(self._travelling, (arrival, self._number, port, packet, False))

    def _at_hub(self, due: float, now: float, port: Port, packet: bytes) -> None:
        if port.nat is not None and not port.nat.lets_in(packet, due):
            port.refused += 1
            return
        arrival = port.down.put(len(packet) - self._skip, due)
        if arrival is None:
            return
        if arrival <= now:
            _write(port, packet)
        else:
            self._number += 1
            heapq.heappush(self._travelling, (arrival, self._number, port, packet, True))

    def _advance(self, now: float) -> None:
        while self._changes and self._changes[0][0] <= now:
            _, home, line = self._changes.pop(0)
            self._change(home, line)
        travelling = self._travelling
        while travelling and travelling[0][0] <= now:
            due, _, port, packet, home = heapq.heappop(travelling)
            if home:
                _write(port, packet)
            else:
                self._at_hub(due, now, port, packet)

    # Control

    def _change(self, home: Any, line: dict[str, float]) -> None:
        for place, port in self._ports.items():
            if home in ("all", place):
                port.change(line)

    def _serve_control(self) -> None:
        connection, _ = self._control.accept()
        with connection:
            connection.settimeout(1.0)
            try:
                answer = self._answer(json.loads(connection.recv(1 << 16)))
            except Exception as error:  # whoever asks wrongly is told so; the packets go on
                answer = {"error": str(error) or repr(error)}
            with suppress(OSError):
                connection.sendall(json.dumps(answer).encode())

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        if "set" in request:
            home, line = request["home"], parse_section(Line, request["set"], "the change", "line")
            if home != "all" and home not in self._ports:
                known = [str(place) for place in self._ports]
                raise ValueError(f'expected a home of {", ".join(known)} or "all", got {home!r}')
            if self._bundles:
                raise ValueError("this laboratory has no limits, and cannot be given any while it runs")
            self._change(home, {name: getattr(line, name) for name in line.model_fields_set})
        homes = {str(place): port.counters() for place, port in self._ports.items()}
        return {"homes": homes, "cpu_seconds": time.process_time()}


def _write(port: Port, packet: bytes) -> None:
    with suppress(OSError):  # a full queue loses packets, as everywhere
        os.write(port.device, packet)


def _is_open(home: Home) -> bool:
    return not home.nat and home.up(0).is_free and home.down(0).is_free


def _open_device(namespace: str, bundles: bool) -> int:
    flags = _IFF_TUN | _IFF_NO_PI | (_IFF_VNET_HDR if bundles else 0)
    with inside(namespace):
        device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), flags))
    if bundles:
        fcntl.ioctl(device, _TUNSETOFFLOAD, _TUN_F_CSUM | _TUN_F_TSO4)
    return device


def main(spec: Path) -> None:
    """Serve the laboratory that the file `spec` describes."""
    described = json.loads(spec.read_text())
    lab = parse_lab(described["lab"], str(spec))
    Forwarder(lab, described["homes"], described["number"], spec.parent / CONTROL).run()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
