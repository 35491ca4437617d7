"""The compute thread: the one thread of a daemon that runs torch, so that arithmetic never holds up the network."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class ComputeThread:
    """Runs one function at a time, in the order given. `busy_seconds` is how long it has computed so far."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="compute")
        self.busy_seconds = 0.0

    async def run(self, function: Callable[[], T]) -> T:
        """The result of `function`, computed on the thread."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, self._timed, function)

    def _timed(self, function: Callable[[], T]) -> T:
        start = time.perf_counter()
        try:
            return function()
        finally:
            self.busy_seconds += time.perf_counter() - start

    def close(self) -> None:
        """Let the running function end and start no other."""
        self._executor.shutdown(wait=True, cancel_futures=True)
