"""Who is a member and what strangers may: their streams, their frames, their budgets, however many identities."""

import asyncio
from collections.abc import Coroutine
from typing import Any

from peers.standing import MOST_STRANGERS, STRANGER_STREAMS, STRANGERS_STREAMS, Standing
from protocol.frame import MAX_STRANGER_BYTES, Header, Kind


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 60))


def make(*members: str, patience: float = 0.0) -> tuple[Standing, Clock]:
    clock = Clock()
    standing = Standing(clock)
    standing.trust(members, patience)
    return standing, clock


def control(size: int) -> Header:
    return Header(Kind.CONTROL, size)


def test_a_stranger_says_little_and_no_tensor_and_nobody_is_a_member_unasked() -> None:
    standing, _ = make("ann")
    for kind in Kind:
        assert standing.refusal("ann", Header(kind, 1 << 20)) == ""
        assert ("no member" in standing.refusal("bob", Header(kind, 1))) == (kind is not Kind.CONTROL)
    assert standing.refusal("bob", control(MAX_STRANGER_BYTES)) == ""
    assert "no member" in standing.refusal("bob", control(MAX_STRANGER_BYTES + 1))
    assert "no member" in Standing().refusal("ann", Header(Kind.FORWARD, 1))


def test_who_becomes_a_member_while_its_frame_waits_is_let_in() -> None:
    async def test() -> None:
        standing, _ = make(patience=20.0)
        waiting = asyncio.create_task(standing.settled("ann", Header(Kind.FORWARD, 9)))
        await asyncio.sleep(0)
        standing.trust({"bob"}, patience=20.0)
        await asyncio.sleep(0)
        assert not waiting.done()
        standing.trust({"ann"}, patience=20.0)
        assert await waiting == ""
        standing.trust({"ann"}, patience=0.0)
        assert "no member" in await standing.settled("cid", Header(Kind.FORWARD, 9))

    run(test())


def test_strangers_streams_are_bounded_over_all_identities_and_the_oldest_gives_way() -> None:
    standing, clock = make("ann")
    ended: list[int] = []
    for number in range(10 * STRANGERS_STREAMS):
        clock.now += 1.0
        assert standing.admit(f"s{number}", number, lambda number=number: ended.append(number)) == ""
        assert number + 1 - len(ended) <= STRANGERS_STREAMS
    assert ended == list(range(9 * STRANGERS_STREAMS))
    for stream in range(32):
        assert standing.admit("ann", ("ann", stream), lambda: ended.append(-1)) == "", "they take no member's place"
    assert "at most 32 streams" in standing.admit("ann", "one more", lambda: None)
    assert -1 not in ended


def test_one_stranger_has_few_streams_and_opens_them_slowly() -> None:
    standing, clock = make()
    ended: list[int] = []
    for number in range(STRANGER_STREAMS + 2):
        assert standing.admit("bob", number, lambda number=number: ended.append(number)) == ""
    assert ended == [0, 1]
    refused = [standing.admit("bob", 100 + n, lambda: None) for n in range(100)]
    assert sum(reason == "" for reason in refused) < 10, "the rest is refused at once"
    clock.now += 600.0
    assert standing.admit("bob", 999, lambda: None) == ""


def test_a_stranger_that_becomes_a_member_keeps_its_streams_and_the_other_way_round() -> None:
    standing, clock = make(*[f"m{n}" for n in range(20)])
    ended: list[object] = []
    for peer in range(20):
        for number in range(8):
            name = (peer, number)
            assert standing.admit(f"m{peer}", name, lambda name=name: ended.append(name)) == ""
    standing.trust({"m0"})
    assert len(ended) == 19 * 8 - STRANGERS_STREAMS and (0, 0) not in ended
    clock.now += 1.0


def test_segments_of_strangers_wait_for_their_turn_each_alone_and_all_together() -> None:
    standing, clock = make("ann")
    delays = [standing.delay("bob", Kind.CONTROL, 0) for _ in range(100)]
    assert delays[0] == 0.0 and delays[-1] > 10.0, "4 a second"
    clock.now += 100.0
    delays = [standing.delay(f"s{n}", Kind.CONTROL, 0) for n in range(640)]
    assert delays[0] == 0.0 and 8.0 < delays[-1] < 10.0, "64 a second of all, however many identities"
    assert standing.delay("ann", Kind.CONTROL, 4096) == 0.0
    assert standing.delay("ann", Kind.FORWARD, 1 << 16) == 0.0


def test_a_member_has_a_budget_of_control_and_none_of_tensors() -> None:
    standing, _ = make("ann", "bob")
    delays = [standing.delay("ann", Kind.CONTROL, 1 << 16) for _ in range(200)]
    assert delays[32] == 0.0 and delays[-1] > 5.0
    assert standing.delay("bob", Kind.CONTROL, 1 << 16) == 0.0, "one member's flood is not another's"
    assert sum(standing.delay("ann", Kind.FORWARD, 1 << 16) for _ in range(10_000)) == 0.0


def test_whoever_sends_what_is_refused_is_kept_out_for_longer_each_time() -> None:
    standing, clock = make("ann")
    waits = []
    for _ in range(8):
        standing.offended("bob")
        start = clock.now
        while standing.admit("bob", "stream", lambda: None):
            clock.now += 0.5
        waits.append(clock.now - start)
    assert waits[0] <= 1.5 and waits == sorted(waits) and 60 <= waits[-1] <= 65
    assert standing.offended("ann") == 0, "a member's place is the coordinator's to take"


def test_what_is_remembered_of_strangers_is_bounded() -> None:
    standing, _ = make()
    for number in range(3 * MOST_STRANGERS):
        standing.offended(f"s{number}")
    assert len(standing._strangers) == MOST_STRANGERS and standing.refused == 3 * MOST_STRANGERS
