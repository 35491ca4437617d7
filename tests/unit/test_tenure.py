"""What a peer does with a view, beside what its stage does."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar
from unittest.mock import AsyncMock, MagicMock

import pytest

from peers import tenure
from protocol.errors import RunFailed
from protocol.records import VIEW
from protocol.signing import SigningKey
from protocol.view import Replica, View

RESTORED = View(3, 5, 9, ((Replica("a", start=4),), (Replica("b", start=4),)), 1, 4, (("a", "b"), ("b",)))


class Worker:
    """A stage whose checkpoint is damaged: it can be built only where it is to fetch its state."""

    built: ClassVar[list[bool]] = []

    def __init__(self, parts: Any, stage: int, replica: Replica, epoch: int, lacking: bool, *rest: Any) -> None:
        self.lacking = lacking
        self.feed = MagicMock()
        self.checkpoint_at_end = AsyncMock()

    async def build(self, weights: str) -> None:
        Worker.built.append(self.lacking)
        if not self.lacking:
            raise RunFailed("other bits")


def taken(view: View, held: dict[int, list[int]], monkeypatch: pytest.MonkeyPatch) -> MagicMock:
    """The peer's parts, after it has taken `view`, with these files."""
    Worker.built = []
    monkeypatch.setattr(tenure, "StageWorker", Worker)
    parts, inbox, key = MagicMock(), MagicMock(), SigningKey.generate()
    parts.transport.peer_id = "a"
    parts.files.held.return_value = held
    parts.files.forget_after, parts.files.follow = AsyncMock(), AsyncMock()
    inbox.release.return_value = []
    parts.served = served = tenure.Tenure(parts, key.public, inbox, MagicMock(), MagicMock(), MagicMock())
    asyncio.run(served.take(key.sign(VIEW, view.to_json()).decode()))
    return parts


def test_a_damaged_checkpoint_is_fetched_from_others_and_ends_nobodys_run(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = taken(RESTORED, {0: [4]}, monkeypatch)
    assert Worker.built == [False, True]
    parts.files.changed.assert_called_once()


def test_a_stage_that_cannot_be_built_from_nothing_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    first = View(1, 1, 9, ((Replica("a"),), (Replica("b"),)))
    with pytest.raises(RunFailed):
        taken(first, {}, monkeypatch)


def test_the_view_is_told_to_those_of_any_view_and_to_no_stranger(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = taken(RESTORED, {}, monkeypatch)
    for peer in ("stranger", "b"):
        parts.served._tell_view(peer)
    ((told, _),) = [call.args for call in parts.send.call_args_list]
    assert told == "b"
