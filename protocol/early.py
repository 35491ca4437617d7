"""What comes too early, for a view that is not known here yet or a step that has not begun: kept, within bounds."""

from __future__ import annotations

from collections import Counter

from protocol.events import Arrived, BlobWanted, Offered, Used, Wanted

AHEAD_STEPS = 2  # stages are at most so far apart in the steps that they work on
MOST_UNTOLD = 4  # senders' worth of room in all, before a view tells who is in the run
TALK = 16  # offers and questions held for one sender, beside its tensors
STRANGERS = ""  # those who are in no view that is known here share one sender's room: one of them may be new

Early = Arrived | Offered | Wanted | Used | BlobWanted


class EarlyEvents:
    """Events to be handled again when a step begins or a view comes. A repeat takes no room."""

    def __init__(self) -> None:
        self._held: dict[tuple[object, ...], Early] = {}
        self._used: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, event: Early, per_sender: int, known: frozenset[str] | None) -> str | None:
        """Keep `event`, or say why there is no room.

        Args:
            per_sender: how many tensors one sender may have here.
            known: who is in the run; None before the first view.
        """
        key, most = (event.peer, *_name(event)), per_sender + TALK
        account = event.peer if known is None or event.peer in known else STRANGERS
        used = self._used[account]
        full = known is None and len(self._held) >= MOST_UNTOLD * most
        if key not in self._held and (used >= most or full):
            return f"no room for more that is too early: {used} of this sender are held"
        self._used[account] += key not in self._held
        self._held[key] = event
        return None

    def release(self) -> list[Early]:
        """All of them, to be handled again."""
        held, self._held = self._held, {}
        self._used.clear()
        return list(held.values())


def _name(event: Early) -> tuple[object, ...]:
    match event:
        case Arrived():
            return Arrived, event.kind, event.view, event.step, event.microbatch
        case Offered():
            return Offered, event.view, event.offer.key
        case Wanted():
            return Wanted, event.view, event.step
        case Used():
            return Used, event.view, event.step, event.microbatch
        case BlobWanted():
            return BlobWanted, event.view, event.key
