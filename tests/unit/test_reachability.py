"""Which of a newcomer's addresses count, and that it is told itself when nobody can reach it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from peers.reachability import MOST_AT_ONCE, TRIES_IN_A_ROW, Reachability
from protocol.errors import NetworkError
from protocol.frame import Frame, parse_control
from protocol.membership_events import JoinAsked

HERE, AWAY = "/ip4/127.0.0.1/tcp/5/p2p/new", "/ip4/93.184.216.34/tcp/5/p2p/new"


class FakeTransport:
    """Peers come from `source`; dials get through if `open`, and cannot be tried if it is None."""

    def __init__(self, source: str, open: bool | None) -> None:
        self.source, self.open = source, open
        self.dialled: list[tuple[str, ...]] = []
        self.sent: list[dict[str, Any]] = []

    def source_of(self, peer: str) -> str:
        return self.source

    async def dials(self, peer: str, addresses: tuple[str, ...]) -> bool:
        self.dialled.append(addresses)
        await asyncio.sleep(0)
        if self.open is None:
            raise NetworkError("the network daemon p2pd did not start")
        return self.open

    def send(self, peer: str, frame: Frame) -> None:
        self.sent.append(parse_control(frame.payload))


def play(
    source: str, open: bool | None, *asked: JoinAsked, nowhere: tuple[str, ...] = ()
) -> tuple[list[JoinAsked], FakeTransport]:
    """What is handed on of the requests in `asked`, which come one after the other. No way leads to `nowhere`."""
    transport, handed = FakeTransport(source, open), []

    async def scene() -> None:
        tasks: set[asyncio.Task[None]] = set()

        def spawn(work: Coroutine[Any, Any, None]) -> None:
            tasks.add(asyncio.create_task(work))

        reachability = Reachability(
            transport,  # type: ignore[arg-type]
            handed.append,
            spawn,
            clock=lambda: 0.0,
            has_way=lambda address: address not in nowhere,
        )
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


def test_where_nothing_can_be_tried_a_newcomer_is_believed_and_the_coordinator_lives() -> None:
    """A p2pd that did not start, when processes or files were short, ended the coordinator."""
    (event,), transport = play("8.8.8.8", None, join(AWAY))
    assert event.addresses == (AWAY,) and not transport.sent


def test_who_is_at_addresses_to_which_no_way_leads_from_here_is_believed() -> None:
    """A coordinator without IPv6 cannot tell whether somebody is at an IPv6 address."""
    six = "/ip6/2606:2800::1/tcp/5/p2p/new"
    (event,), transport = play("8.8.8.8", False, join(six), nowhere=(six,))
    assert event.addresses == (six,) and not transport.dialled and not transport.sent
    (event,), transport = play("8.8.8.8", False, join(AWAY, six), nowhere=(six,))
    assert event.addresses == (AWAY, six) and transport.dialled == [(AWAY,)] and not transport.sent


def test_nobody_waits_behind_a_crowd_whose_addresses_are_to_be_tried() -> None:
    """1,024 identities with addresses that swallow what is sent kept newcomers waiting for most of an hour."""
    crowd = [JoinAsked(f"crowd-{number}", (AWAY,), session="1") for number in range(int(TRIES_IN_A_ROW))]
    events, transport = play("8.8.8.8", False, *crowd, join(AWAY))
    assert len(transport.dialled) == len(crowd) and events[-1].peer == "new" and events[-1].addresses == (AWAY,)


def test_who_gets_no_turn_in_time_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peers.reachability.PATIENCE_SECONDS", 0.01)
    handed: list[JoinAsked] = []

    async def scene() -> None:
        forever = asyncio.Event()

        class Slow(FakeTransport):
            async def dials(self, peer: str, addresses: tuple[str, ...]) -> bool:
                await forever.wait()
                return False

        tasks: list[asyncio.Task[None]] = []

        def spawn(work: Coroutine[Any, Any, None]) -> None:
            tasks.append(asyncio.create_task(work))

        reachability = Reachability(
            Slow("8.8.8.8", False),  # type: ignore[arg-type]
            handed.append,
            spawn,
            has_way=lambda address: True,
        )
        for number in range(MOST_AT_ONCE):
            reachability.asked(JoinAsked(f"slow-{number}", (AWAY,), session="1"))
        reachability.asked(join(AWAY))
        await tasks[-1]
        assert [event.peer for event in handed] == ["new"] and handed[0].addresses == (AWAY,)
        forever.set()
        await asyncio.gather(*tasks)

    asyncio.run(scene())
    assert len(handed) == MOST_AT_ONCE + 1


def test_who_asks_again_is_told_once_and_again_after_a_restart() -> None:
    events, transport = play("8.8.8.8", False, join(AWAY), join(AWAY), join(AWAY), join(AWAY, session="2"))
    assert [event.addresses for event in events] == [()] * 4 and len(transport.sent) == 2
