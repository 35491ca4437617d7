"""What the trainer of a hivemind chain waits for: its calls, from before a tensor is packed to when the answer is."""

from __future__ import annotations

import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from types import ModuleType
from typing import Any

from peers.trace import StepTracer

Round = tuple[int, int, float, float]  # step, microbatches, when it began and ended


class Calls:
    """Tells `tracer` of the calls of all threads, by stage and microbatch."""

    def __init__(self, tracer: StepTracer) -> None:
        self._tracer, self._now = tracer, threading.local()

    def begin(self, microbatch: int) -> None:
        """What this thread calls from now on is of `microbatch`."""
        self._now.microbatch = microbatch

    def watch(self, client: ModuleType) -> None:
        """See the calls that hivemind's module of `RemoteExpert` makes from now on."""
        client.expert_forward = self._watched("F", client.expert_forward)  # type: ignore[attr-defined]
        client.expert_backward = self._watched("B", client.expert_backward)  # type: ignore[attr-defined]

    def _watched(self, letter: str, call: Callable[..., Awaitable[Any]]) -> Callable[..., Coroutine[Any, Any, Any]]:
        # hivemind makes the coroutine in the thread that calls, and runs it in another one.
        def made(uid: str, *rest: Any) -> Coroutine[Any, Any, Any]:
            name, start = f"{letter}{self._now.microbatch}", time.monotonic()

            async def timed() -> Any:
                answer = await call(uid, *rest)
                self._tracer.span(f"calls of stage {uid.split('.')[1]}", name, start, time.monotonic())
                return answer

            return timed()

        return made


def step_spans(rounds: Sequence[Round], microbatches: int) -> list[tuple[str, float, float]]:
    """(name, start, end) of the steps that the rounds make up; of one that is not whole the name says so."""
    found = []
    for step in dict.fromkeys(step for step, *_ in rounds):
        mine = [one for one in rounds if one[0] == step]
        whole = sum(count for _, count, _, _ in mine) == microbatches
        found.append((f"{'' if whole else 'part of '}step {step}", mine[0][2], mine[-1][3]))
    return found
