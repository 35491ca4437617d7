"""Plain sockets inside a laboratory: `python -m lab_checks.probe VERB ...`, one JSON object on the standard output.

It loads nothing but the standard library, so that it starts in a moment.
"""

from __future__ import annotations

import json
import socket
import struct
import sys
import time
from collections.abc import Callable

PORT = 5077
DATAGRAM_BYTES = 200
WAIT_SECONDS = 60.0
_CHUNK = bytes(1 << 16)


def main() -> None:
    """Run the verb that the command line names."""
    verbs: dict[str, Callable[..., None]] = {
        "sink": sink,
        "pour": pour,
        "echo": echo,
        "round-trips": round_trips,
        "count": count,
        "shower": shower,
    }
    verbs[sys.argv[1]](*sys.argv[2:])


def say(**values: object) -> None:
    """One line for whoever started this."""
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


class Meter:
    """What comes in, from `skip` seconds after the first of it on."""

    def __init__(self, skip: float) -> None:
        self._skip = skip
        self._first: float | None = None
        self._begun: float | None = None
        self._last = 0.0
        self._bytes = 0

    def add(self, size: int, now: float) -> None:
        """So many bytes came."""
        if self._first is None:
            self._first = now
        if now - self._first < self._skip:
            return
        if self._begun is None:  # what comes with it came before
            self._begun = now
        else:
            self._bytes += size
        self._last = now

    @property
    def bytes_per_second(self) -> float:
        """0 if there was too little to tell."""
        if self._begun is None or self._last <= self._begun:
            return 0.0
        return self._bytes / (self._last - self._begun)


def sink(host: str, skip: str) -> None:
    """Take one connection; say what came in, in bytes a second, from `skip` seconds after its first byte on."""
    with socket.create_server((host, PORT)) as server:
        say(ready=True)
        server.settimeout(WAIT_SECONDS)
        connection, _ = server.accept()
    with connection:
        connection.settimeout(WAIT_SECONDS)
        meter = Meter(float(skip))
        while data := connection.recv(1 << 18):
            meter.add(len(data), time.monotonic())
        say(bytes_per_second=meter.bytes_per_second)


def pour(host: str, seconds: str) -> None:
    """Send for so long what `sink` takes."""
    with socket.create_connection((host, PORT), timeout=WAIT_SECONDS) as connection:
        end = time.monotonic() + float(seconds)
        while time.monotonic() < end:
            connection.sendall(_CHUNK)


def echo(host: str) -> None:
    """Send back what one connection brings."""
    with socket.create_server((host, PORT)) as server:
        say(ready=True)
        server.settimeout(WAIT_SECONDS)
        connection, _ = server.accept()
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while data := connection.recv(64):
            connection.sendall(data)


def round_trips(host: str, count: str) -> None:
    """The seconds of so many round trips of a byte, one after the other."""
    times = []
    with socket.create_connection((host, PORT), timeout=WAIT_SECONDS) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(int(count)):
            start = time.monotonic()
            connection.sendall(b"x")
            connection.recv(1)
            times.append(time.monotonic() - start)
    say(seconds=times)


def count(host: str) -> None:
    """How many different datagrams come before an end is announced, or nothing comes for a while."""
    seen: set[int] = set()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
        server.bind((host, PORT))
        say(ready=True)
        server.settimeout(WAIT_SECONDS)
        while True:
            (number,) = struct.unpack_from("!i", server.recv(DATAGRAM_BYTES))
            if number < 0:
                break
            seen.add(number)
            server.settimeout(5.0)
    say(came=len(seen))


def shower(host: str, count: str, pause: str) -> None:
    """Send so many datagrams, with a pause of so many seconds between two, then several times the end."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        for number in range(int(count)):
            client.sendto(struct.pack("!i", number).ljust(DATAGRAM_BYTES), (host, PORT))
            time.sleep(float(pause))
        time.sleep(1.0)
        for _ in range(50):
            client.sendto(struct.pack("!i", -1), (host, PORT))


if __name__ == "__main__":
    main()
