"""The compute thread: the one thread of a daemon that runs torch, so that arithmetic never holds up the network."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from peers.trace import NO_TRACE, Tracer
from protocol.work import Action, Verb

T = TypeVar("T")


class ComputeThread:
    """Runs one function at a time, in the order given.

    Args:
        cpu_clock: processor seconds of the thread that calls it. Where torch computes on others too (several threads, a
            GPU), a clock of real time, for want of better.
        tracer: gets each action's span.

    Attributes:
        busy_seconds: how long it has computed so far, by the clock on the wall.
        cpu_seconds: the same by `cpu_clock`.
    """

    def __init__(self, cpu_clock: Callable[[], float] = time.thread_time, tracer: Tracer = NO_TRACE) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="compute")
        self._cpu_clock, self._tracer = cpu_clock, tracer
        self.busy_seconds = self.cpu_seconds = 0.0
        self._done: dict[Verb, tuple[int, float]] = {}

    async def run(self, function: Callable[[], T], action: Action | None = None) -> T:
        """The result of `function`, computed on the thread. `action`: what it does, where it is part of a step."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, self._timed, function, action)

    def done(self, verb: Verb) -> tuple[int, float]:
        """How many actions of `verb` have been done, and their seconds by `cpu_clock`."""
        return self._done.get(verb, (0, 0.0))

    def _timed(self, function: Callable[[], T], action: Action | None) -> T:
        start, cpu = time.monotonic(), self._cpu_clock()
        try:
            return function()
        finally:
            self._note(action, start, self._cpu_clock() - cpu)

    def _note(self, action: Action | None, start: float, cpu: float) -> None:
        end = time.monotonic()
        self.busy_seconds += end - start
        self.cpu_seconds += cpu
        self._tracer.span("compute", "other" if action is None else str(action), start, end)
        if action is not None:
            count, seconds = self.done(action.verb)
            self._done[action.verb] = count + 1, seconds + cpu

    def close(self) -> None:
        """Let the running function end and start no other."""
        self._executor.shutdown(wait=True, cancel_futures=True)
