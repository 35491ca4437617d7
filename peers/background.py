"""Tasks beside a daemon's main loop, none of which may fail in silence."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from peers.transport import Transport, TransportEvent


class Background:
    """Tasks of one daemon. The first failure is kept in `failure`, for the main loop to wait on."""

    def __init__(self) -> None:
        self.failure: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` beside the main loop."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def fail(self, error: BaseException) -> None:
        """Note why the daemon cannot go on; only the first reason counts."""
        if not self.failure.done():
            self.failure.set_result(error)

    async def close(self) -> None:
        """Cancel what still runs and wait for its end."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)


async def next_event(
    transport: Transport, seconds: float | None, *interrupts: asyncio.Future[Any]
) -> TransportEvent | None:
    """The transport's next event; None if `seconds` pass or one of `interrupts` is done first."""
    receive = asyncio.ensure_future(transport.receive())
    try:
        await asyncio.wait({receive, *interrupts}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        return receive.result() if receive.done() else None
    finally:
        receive.cancel()
