"""Which of a newcomer's addresses count, and that it is told itself when nobody can reach it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from peers.reachability import Reachability
from protocol.frame import Frame, parse_control
from protocol.membership_events import JoinAsked

HERE, AWAY = "/ip4/127.0.0.1/tcp/5/p2p/new", "/ip4/93.184.216.34/tcp/5/p2p/new"


class FakeTransport:
    """Peers come from `source`; dials get through if `open`."""

    def __init__(self, source: str, open: bool) -> None:
        self.source, self.open = source, open
        self.dialled: list[tuple[str, ...]] = []
        self.sent: list[dict[str, Any]] = []

    def source_of(self, peer: str) -> str:
        return self.source

    async def dials(self, peer: str, addresses: tuple[str, ...]) -> bool:
        self.dialled.append(addresses)
        await asyncio.sleep(0)
        return self.open

    def send(self, peer: str, frame: Frame) -> None:
        self.sent.append(parse_control(frame.payload))


def play(source: str, open: bool, *asked: JoinAsked) -> tuple[list[JoinAsked], FakeTransport]:
    """What is handed on of the requests in `asked`, which come one after the other."""
    transport, handed = FakeTransport(source, open), []

    async def scene() -> None:
        tasks: set[asyncio.Task[None]] = set()

        def spawn(work: Coroutine[Any, Any, None]) -> None:
            tasks.add(asyncio.create_task(work))

        reachability = Reachability(transport, handed.append, spawn)  # type: ignore[arg-type]
        for event in asked:
            reachability.asked(event)
            await asyncio.gather(*tasks)

    asyncio.run(scene())
    return handed, transport


def join(*addresses: str, session: str = "1") -> JoinAsked:
    return JoinAsked("new", addresses, session=session)


@pytest.mark.parametrize("source", ["", "127.0.0.1", "::1"])
def test_a_peer_of_this_machine_is_believed(source: str) -> None:
    (event,), transport = play(source, False, join(HERE))
    assert (event.addresses, event.source) == ((HERE,), source)
    assert not transport.dialled and not transport.sent


def test_an_address_that_leads_nowhere_is_not_accepted_from_elsewhere() -> None:
    """A peer that came over the network named only its own loopback, was believed, and the run stood still."""
    (event,), transport = play("8.8.8.8", True, join(HERE))
    assert (event.addresses, event.source, event.claimed) == ((), "8.8.8.8", (HERE,))
    (told,) = transport.sent
    assert told["type"] == "notice" and HERE in told["text"] and "--no-listen" in told["text"]


def test_an_address_that_answers_counts_and_the_others_do_not() -> None:
    (event,), transport = play("8.8.8.8", True, join(HERE, AWAY))
    assert event.addresses == (AWAY,) and transport.dialled == [(AWAY,)] and not transport.sent


def test_who_cannot_be_dialled_is_told_so_and_treated_as_taking_no_connections() -> None:
    (event,), transport = play("8.8.8.8", False, join(AWAY))
    assert event.addresses == () and AWAY in transport.sent[0]["text"]


def test_a_repeated_question_is_answered_without_dialling_again_and_a_restart_is_not() -> None:
    events, transport = play("8.8.8.8", True, join(AWAY), join(AWAY), join(AWAY, session="2"))
    assert [event.addresses for event in events] == [(AWAY,)] * 3 and len(transport.dialled) == 2


def test_who_takes_no_connections_is_not_told_that_it_takes_none() -> None:
    (event,), transport = play("8.8.8.8", False, join())
    assert event.addresses == () and not transport.sent and not transport.dialled
