"""Stage machines for tests: rules, a toy stage that carries out what they ask for, and a crowd of them that talk.

The toy's numbers are sets of microbatches, so that what is in a sum can be read off: its part holds the microbatches
whose backwards it has done, and applying a step checks that every microbatch is in the sum once.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from protocol.blob import Blob, BlobKey, BlobKind, Meta
from protocol.effects import (
    AskChunk,
    Compute,
    Effect,
    FindState,
    Reduce,
    Send,
    SendChunk,
    SendGone,
    SendOffer,
    SendTaken,
    SendUsed,
    SendWant,
    WantBlob,
)
from protocol.events import Arrived, Computed, Event, StateFound, ViewChanged
from protocol.frame import Kind, parse_control
from protocol.messages import chunk_event, to_event, to_frame
from protocol.place import Rules
from protocol.stage_machine import StageMachine
from protocol.view import Replica, View
from protocol.work import Schedule, Verb

SIZE = 600  # bytes of every blob
SPOKEN = SendOffer | AskChunk | SendChunk | SendTaken | SendUsed | SendWant | WantBlob | SendGone


def rules(
    microbatches: int | Callable[[int], int] = 2,
    window: int = 4,
    copies: Callable[[int], int] = lambda step: 0,
    schedule: Schedule = Schedule.ONE_F_ONE_B,
) -> Rules:
    """A run's rules."""
    count = microbatches if callable(microbatches) else lambda step: microbatches
    return Rules(count, window, lambda key: SIZE, copies, schedule)


def pad(value: Any) -> bytes:
    """`value` as a blob's bytes."""
    raw = json.dumps(value).encode()
    return raw + b" " * (SIZE - len(raw))


def part_of(stage: int, step: int, covers: Iterable[int], weights: str, salt: str = "") -> Blob:
    """A replica's part."""
    covered = tuple(covers)
    return Blob.of(BlobKey(BlobKind.PART, stage, step), pad([*covered, salt]), Meta(covered, (), weights))


def total_of(stage: int, step: int, count: int) -> Blob:
    """A step's total."""
    return Blob.of(BlobKey(BlobKind.TOTAL, stage, step), pad([*range(count), ""]))


def state_of(stage: int, step: int, weights: str | None = None, salt: str = "") -> Blob:
    """A stage's state."""
    hashed = f"w{step}" if weights is None else weights
    return Blob.of(BlobKey(BlobKind.STATE, stage, step), pad([f"w{step}", salt]), Meta((), (), hashed))


class Toy:
    """Carries out the actions of one stage, and fails where the real one would go wrong."""

    def __init__(self, stage: int, last_stage: int, count: Callable[[int], int], applied: int | None) -> None:
        self.stage, self.last_stage, self.count = stage, last_stage, count
        self.weights = "" if applied is None else f"w{applied}"
        self.sum: list[int] = []
        self.open: set[int] = set()

    def run(self, work: Compute) -> Any:
        """What `work` makes."""
        microbatch, step = work.action.microbatch, work.step
        match work.action.verb:
            case Verb.FORWARD:
                assert microbatch not in self.open, f"{work.action} while its activations are there"
                self.open.add(microbatch)
                return None if self.stage == self.last_stage else f"x{step}.{microbatch}"
            case Verb.BACKWARD:
                self.open.remove(microbatch)
                assert microbatch not in self.sum, f"{work.action} twice into one sum"
                self.sum.append(microbatch)
                return None if self.stage == 0 else f"g{step}.{microbatch}"
            case Verb.RESET:
                self._reset(work.payload)
                return None
            case Verb.PART:
                assert sorted(self.sum) == list(work.payload), f"a part of {work.payload} from {self.sum}"
                return part_of(self.stage, step, work.payload, self.weights)
            case Verb.APPLY:
                return self._apply(step, work.payload)
            case Verb.STATE:
                return state_of(self.stage, step, self.weights)
            case Verb.LOAD:
                self.weights = json.loads(bytes(work.payload.data))[0]
                return self.weights
        raise AssertionError(work)

    def _reset(self, microbatches: tuple[int, ...] | None) -> None:
        if microbatches is None:
            self.sum.clear()
            self.open.clear()
        else:
            assert not set(microbatches) & set(self.sum), "nothing can be taken out of a sum"
            self.open -= set(microbatches)

    def _apply(self, step: int, reduce: Reduce) -> Blob | None:
        added = list(self.sum)
        if reduce.parts:
            added = [m for part in reduce.parts for m in json.loads(bytes(part.data))[:-1]]
        assert sorted(added) == list(range(self.count(step))), f"step {step} is applied from {added}"
        self.sum.clear()
        self.open.clear()
        self.weights = f"w{step}"
        return total_of(self.stage, step, self.count(step)) if reduce.keep else None


class Crowd:
    """Peers that talk, in the order in which they speak, unless `lose` takes a message away."""

    def __init__(self, view: View, rules: Rules) -> None:
        self.rules, self.view = rules, view
        self.machines: dict[str, StageMachine] = {}
        self.toys: dict[str, Toy] = {}
        self.said: dict[str, list[Effect]] = {}
        self.waiting: dict[str, Compute] = {}
        self.paused: set[str] = set()
        self.files: dict[str, Blob] = {}
        self.lose: Callable[[str, Effect], bool] = lambda sender, effect: False
        self._queue: deque[tuple[str, Event]] = deque()

    def add(self, peer: str, applied: int = 0, lacking: bool = False) -> StageMachine:
        """A peer of the view begins."""
        machine = self.machines[peer] = StageMachine(peer, self.rules, applied, lacking)
        stage = self.view.stage_of(peer)
        assert stage is not None
        count, last = self.rules.microbatches, len(self.view.stages) - 1
        self.toys[peer] = Toy(stage, last, count, None if lacking else applied)
        self.said[peer] = []
        return machine

    def show(self, view: View, only: Iterable[str] | None = None) -> None:
        """A view comes to all, or to some."""
        self.view = view
        for peer in list(self.machines) if only is None else only:
            self.tell(peer, ViewChanged(view))

    def kill(self, peer: str) -> None:
        """It is gone; what it had said arrives."""
        del self.machines[peer]
        self.waiting.pop(peer, None)

    def tell(self, peer: str, event: Event) -> None:
        """An event at one peer."""
        self._queue.append((peer, event))

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        """Until nothing is left to do, or `until` holds."""
        while not until():
            if self._queue:
                peer, event = self._queue.popleft()
                if peer in self.machines:
                    self._take(peer, self.machines[peer].handle(event))
                continue
            free = next((peer for peer in self.waiting if peer not in self.paused), None)
            if free is None:
                return
            work = self.waiting.pop(free)
            self.tell(free, Computed(work.action, self.toys[free].run(work)))

    def of(self, peer: str, kind: type[Any]) -> list[Any]:
        """What `peer` asked for, of one kind."""
        return [effect for effect in self.said[peer] if isinstance(effect, kind)]

    def actions(self, peer: str) -> list[str]:
        """What `peer` computed, as short strings."""
        return [str(work.action) for work in self.of(peer, Compute)]

    def _take(self, peer: str, effects: list[Effect]) -> None:
        self.said[peer] += effects
        for effect in effects:
            if isinstance(effect, Compute):
                assert peer not in self.waiting, f"{effect} while {self.waiting[peer]} runs"
                self.waiting[peer] = effect
            elif isinstance(effect, FindState):
                self.tell(peer, StateFound(effect.peer, effect.key, self.files.get(peer)))
            elif isinstance(effect, Send | SPOKEN) and not self.lose(peer, effect):
                self._queue.append((effect.peer, heard(peer, effect)))


def heard(sender: str, effect: Effect) -> Event:
    """What `effect` of `sender` is at its other end."""
    if isinstance(effect, Send):
        return Arrived(sender, effect.kind, effect.view, effect.step, effect.microbatch, effect.payload)
    assert isinstance(effect, SPOKEN)
    frame = to_frame(effect)
    return (
        chunk_event(sender, frame)
        if frame.header.kind is Kind.CHUNK
        else to_event(sender, parse_control(frame.payload))
    )


def one_view(*stages: str, number: int = 1, first_step: int = 1, last_step: int = 9) -> View:
    """A view of stages that are written `"a b"`: `a*` only follows, `a!2` was lost by view 2, `a*3` starts from 3."""
    return View(number, first_step, last_step, tuple(tuple(_replica(w) for w in words.split()) for words in stages))


def _replica(word: str) -> Replica:
    name, _, lost = word.partition("!")
    name, star, start = name.partition("*")
    share = 0.0 if star else 1.0
    return Replica(name, (), share, share, int(start or 0), int(lost or 0))
