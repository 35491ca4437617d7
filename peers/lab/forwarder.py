"""The hub: `python -m peers.lab.forwarder SPEC.json`, one process that holds the lines of all homes of a laboratory.

    home A's TUN --read--> A's line up --> hub --> B's line down --write--> home B's TUN

A packet waits in a heap until it is at the hub, then again until it is at the other home: packets from near and far
meet at B's line in the order in which they get there. Times are those of the model; when this process wakes late, and
it wakes by whole milliseconds, the packets that are due go at once, and the rate is kept.

It ends when its standard input does: when its parent is gone. On a socket beside the spec it takes one JSON object a
connection, to change a line or to tell its counters.
"""

from __future__ import annotations

import heapq
import json
import os
import select
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from peers.lab.device import HEADER_BYTES, MOST_BYTES, bytes_on_line, largest_bundle, open_device
from peers.lab.lab_file import Home, LabFile, Line, Place, address_at, parse_lab, places
from peers.lab.namespaces import namespace_at
from peers.lab.nat import Nat
from protocol.section import parse_section

CONTROL = "control.sock"
_BATCH = 64  # packets from one home before the others have their turn
_DESTINATION = slice(HEADER_BYTES + 16, HEADER_BYTES + 20)
_AT_HOME = -1.0
_PRIORITY = -15  # the programs in the homes may use all cores: the line between them is none of theirs


class Port:
    """A home at the hub: its device, its line, and its NAT."""

    def __init__(self, home: Home, device: int, address: str, seed: int) -> None:
        self.device, self.address = device, socket.inet_aton(address)
        self.access = home.access(seed)
        self.up, self.down = self.access.up, self.access.down
        self.nat = Nat() if home.nat else None
        self.refused = 0

    def write(self, packet: bytes) -> None:
        """Give the home a packet. Into a full queue, or a home that is just being removed, it is lost."""
        try:
            os.write(self.device, packet)
        except OSError:
            self.refused += 1

    def counters(self) -> dict[str, Any]:
        """What went over its line, and how many packets did not get in."""
        return {"up": asdict(self.up.counters), "down": asdict(self.down.counters), "refused": self.refused}


class Forwarder:
    """Serves until the parent is gone."""

    def __init__(self, lab: LabFile, homes: int, number: int, control: Path) -> None:
        self._ports: dict[Place, Port] = {}
        bundle = largest_bundle(lab, homes)
        for seed, place in enumerate(places(homes), lab.seed):
            device = open_device(namespace_at(number, place), bundle)
            self._ports[place] = Port(lab.at(place), device, address_at(number, place), seed)
        self._by_address = {port.address: port for port in self._ports.values()}
        start = time.monotonic()
        self._changes = [(start + change.after_seconds, change) for change in lab.changes]
        self._changes.sort(key=lambda change: change[0])
        # When it is there, a number to tell equals apart, for whom, the packet, its bytes on the line, and when its
        # first byte was at the hub, or _AT_HOME: there means at home.
        self._travelling: list[tuple[float, int, Port, bytes, int, float]] = []
        self._number = 0
        self._control = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._control.bind(str(control))
        self._control.listen()
        self._ended = False

    def run(self) -> None:
        """Carry packets."""
        handlers: dict[int, Callable[[], None]] = {0: self._end, self._control.fileno(): self._serve_control}
        handlers |= {port.device: partial(self._read, port) for port in self._ports.values()}
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
        """None of the waits is shorter than a millisecond: what comes meanwhile is carried in one go."""
        due = self._travelling[0][0] if self._travelling else float("inf")
        if self._changes:
            due = min(due, self._changes[0][0])
        return -1.0 if due == float("inf") else max(0.0, due - time.monotonic())

    # Packets. A busy laboratory has ten thousand a second, so these few functions avoid what they can.

    def _read(self, port: Port) -> None:
        device, up, nat, now = port.device, port.up, port.nat, time.monotonic()
        for _ in range(_BATCH):
            try:
                packet = os.read(device, HEADER_BYTES + MOST_BYTES)
            except OSError:  # no more
                return
            target = self._by_address.get(packet[_DESTINATION])
            if target is None:  # a broadcast, or IPv6, which asks for its router by itself
                continue
            if nat is not None:
                nat.sent(packet[HEADER_BYTES:], now)
            size = bytes_on_line(packet)
            arrival = up.put(size, now)
            if arrival is None:
                continue
            since = up.first_arrival(size, arrival)
            if arrival <= now:
                self._pass_hub(target, packet, size, now, arrival, since)
            else:
                self._later(arrival, target, packet, size, since)

    def _pass_hub(self, target: Port, packet: bytes, size: int, now: float, at: float, since: float) -> None:
        """The packet is at the hub `at`, with its first byte `since`; it is `now` that we look at it."""
        if target.nat is not None and not target.nat.lets_in(packet[HEADER_BYTES:], at):
            target.refused += 1
            return
        arrival = target.down.put(size, at, since)
        if arrival is None:
            return
        if arrival <= now:
            target.write(packet)
        else:
            self._later(arrival, target, packet, size, _AT_HOME)

    def _later(self, due: float, target: Port, packet: bytes, size: int, since: float) -> None:
        self._number += 1
        heapq.heappush(self._travelling, (due, self._number, target, packet, size, since))

    def _advance(self, now: float) -> None:
        while self._changes and self._changes[0][0] <= now:
            _, change = self._changes.pop(0)
            self._change(change.home, change.line)
        travelling = self._travelling
        while travelling and travelling[0][0] <= now:
            due, _, target, packet, size, since = heapq.heappop(travelling)
            if since == _AT_HOME:
                target.write(packet)
            else:
                self._pass_hub(target, packet, size, now, due, since)

    # Control

    def _change(self, home: Place | str, line: dict[str, float]) -> None:
        for place, port in self._ports.items():
            if home in ("all", place):
                port.access.change(line)

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
                known = ", ".join(str(place) for place in self._ports)
                raise ValueError(f"expected one of the laboratory's homes, {known} or all, got {home!r}")
            self._change(home, {name: getattr(line, name) for name in line.model_fields_set})
        homes = {str(place): port.counters() for place, port in self._ports.items()}
        return {"homes": homes, "cpu_seconds": time.process_time()}


def main(spec: Path) -> None:
    """Serve the laboratory that the file `spec` describes."""
    described = json.loads(spec.read_text())
    with suppress(OSError):
        os.nice(_PRIORITY)
    lab = parse_lab(described["lab"], str(spec))
    Forwarder(lab, described["homes"], described["number"], spec.parent / CONTROL).run()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
