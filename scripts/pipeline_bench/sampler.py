"""Counting the same way for every arm: CPU of its processes and bytes on its homes' lines, twice a second."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from pipeline_bench.homes import Homes, Traffic
from pipeline_bench.processes import Marked

PERIOD_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Sample:
    """Running totals at one moment.

    Attributes:
        at: seconds, by the machine's monotonic clock.
        cpu: seconds.
        lines: bytes sent and received, by home.
    """

    at: float
    cpu: float
    lines: Traffic


@dataclass(frozen=True, slots=True)
class Usage:
    """What was used between two moments.

    Attributes:
        sent: bytes, by home; `received` likewise.
    """

    cpu: float
    sent: tuple[float, ...]
    received: tuple[float, ...]


def between(samples: list[Sample], start: float, end: float) -> Usage:
    """The use of `start` to `end`, linear between samples.

    Raises:
        ValueError: the samples do not reach over both.
    """
    if len(samples) < 2 or not samples[0].at <= start <= end <= samples[-1].at:
        raise ValueError("expected samples from before the start to after the end")
    first, last = _at(samples, start), _at(samples, end)
    cpu, *lines = (b - a for a, b in zip(first, last, strict=True))
    return Usage(cpu, tuple(lines[::2]), tuple(lines[1::2]))


def _at(samples: list[Sample], moment: float) -> list[float]:
    later = max(1, bisect_left(samples, moment, key=lambda sample: sample.at))
    before, after = samples[later - 1], samples[later]
    share = (moment - before.at) / (after.at - before.at)
    return [a + share * (b - a) for a, b in zip(_numbers(before), _numbers(after), strict=True)]


def _numbers(sample: Sample) -> list[float]:
    return [sample.cpu, *(float(number) for line in sample.lines for number in line)]


class Sampler:
    """Samples in a thread of its own, while it is entered."""

    def __init__(self, marked: Marked, homes: Homes) -> None:
        self.samples: list[Sample] = []
        self._marked, self._homes = marked, homes
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with suppress(OSError, ValueError):
                self.samples.append(Sample(time.monotonic(), self._marked.cpu_seconds(), self._homes.traffic()))
            if self._stop.wait(PERIOD_SECONDS):
                return
