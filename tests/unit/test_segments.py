"""Frames in pieces: cut, joined in any order, and refused where they contradict themselves."""

import random
import tracemalloc

import pytest

from peers import segments
from peers.segments import PARTIAL_SECONDS, PREFIX_BYTES, SEGMENT_BYTES, Begun, Cutter, Joiner, Prefix, probe
from protocol.errors import BadFrame
from protocol.frame import Frame, Header, Kind


def frame(kind: Kind, size: int, step: int = 0) -> Frame:
    payload = random.Random(size + step).randbytes(size)
    return Frame(Header(kind, size, step=step), payload)


def cut(cutter: Cutter) -> list[tuple[Prefix, bytes]]:
    pieces = []
    while (piece := cutter.next()) is not None:
        pieces.append((piece.prefix, bytes(piece.data)))
    return pieces


@pytest.mark.parametrize("size", [0, 1, SEGMENT_BYTES - 1, SEGMENT_BYTES, SEGMENT_BYTES + 1, 5 * SEGMENT_BYTES + 7])
def test_a_frame_comes_out_as_it_went_in_whatever_the_order(size: int) -> None:
    cutter, sent = Cutter(7), [frame(Kind.FORWARD, size, step) for step in range(3)]
    for one in sent:
        cutter.put(one)
    pieces = cut(cutter)
    assert sum(len(data) for _, data in pieces) == 3 * size and len(cutter) == 0
    assert len(pieces) == 3 * max(1, -(-size // SEGMENT_BYTES))
    random.Random(1).shuffle(pieces)
    joiner = Joiner()
    got = [joiner.add(Prefix.unpack(prefix.pack()), data) for prefix, data in pieces]
    whole = sorted((one for one in got if one is not None), key=lambda one: one.header.step)
    assert [(one.header, bytes(one.payload)) for one in whole] == [(one.header, bytes(one.payload)) for one in sent]
    assert len(joiner) == 0


def test_the_urgent_overtakes_what_is_begun() -> None:
    cutter = Cutter(1)
    for kind in (Kind.CHUNK, Kind.FORWARD):
        cutter.put(frame(kind, 3 * SEGMENT_BYTES))
    kinds = [cutter.next().prefix.header.kind]  # type: ignore[union-attr]
    cutter.put(frame(Kind.BACKWARD, 2 * SEGMENT_BYTES))
    kinds.append(cutter.next().prefix.header.kind)  # type: ignore[union-attr]
    cutter.put(frame(Kind.CONTROL, 10))
    kinds += [prefix.header.kind for prefix, _ in cut(cutter)]
    expected = [Kind.FORWARD, Kind.BACKWARD, Kind.CONTROL, Kind.BACKWARD] + 2 * [Kind.FORWARD] + 3 * [Kind.CHUNK]
    assert kinds == expected


def test_new_streams_drop_what_was_begun_and_keep_the_rest() -> None:
    cutter = Cutter(1)
    for step in range(3):
        cutter.put(frame(Kind.FORWARD, 2 * SEGMENT_BYTES, step))
    assert cutter.next() is not None
    cutter.restart(2)
    pieces = cut(cutter)
    assert [prefix.header.step for prefix, _ in pieces] == [1, 1, 2, 2]
    assert {prefix.link for prefix, _ in pieces} == {2} and pieces[0][0].offset == 0


def test_the_oldest_of_the_least_urgent_is_dropped_but_not_what_is_begun() -> None:
    cutter = Cutter(1)
    for kind in (Kind.BACKWARD, Kind.FORWARD, Kind.FORWARD):
        cutter.put(frame(kind, 2 * SEGMENT_BYTES))
    cutter.next()  # begins the backward
    assert cutter.drop_oldest() and cutter.drop_oldest() and not cutter.drop_oldest()
    assert [prefix.header.kind for prefix, _ in cut(cutter)] == [Kind.BACKWARD]


def test_a_probe_has_no_data() -> None:
    raw = probe(3).prefix.pack()
    prefix = Prefix.unpack(raw)
    assert (prefix.link, prefix.data_bytes, len(raw)) == (3, 0, PREFIX_BYTES)


@pytest.mark.parametrize(("offset", "length"), [(1, 10), (SEGMENT_BYTES, SEGMENT_BYTES), (SEGMENT_BYTES, 0)])
def test_an_offset_where_no_segment_begins_is_refused(offset: int, length: int) -> None:
    with pytest.raises(BadFrame):
        Prefix.unpack(Prefix(1, 1, offset, Header(Kind.FORWARD, length)).pack())


def test_contradictions_are_refused() -> None:
    header, other = Header(Kind.FORWARD, 3 * SEGMENT_BYTES), Header(Kind.FORWARD, 2 * SEGMENT_BYTES)
    data = bytes(SEGMENT_BYTES)
    for again in (Prefix(1, 5, 0, header), Prefix(1, 5, SEGMENT_BYTES, other)):
        joiner = Joiner()
        joiner.add(Prefix(1, 5, 0, header), data)
        with pytest.raises(BadFrame):
            joiner.add(again, data)


def test_frames_that_are_not_whole_are_bounded_by_what_came_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "MOST_PARTIAL_BYTES", 5 * SEGMENT_BYTES)
    joiner, header, data = Joiner(), Header(Kind.FORWARD, 2 * SEGMENT_BYTES), bytes(SEGMENT_BYTES)
    for number in range(5):
        joiner.add(Prefix(1, number, 0, header), data)
    with pytest.raises(BadFrame, match="not whole"):
        joiner.add(Prefix(1, 5, 0, header), data)
    monkeypatch.setattr(segments, "MOST_PARTIAL_BYTES", 6 * SEGMENT_BYTES)
    assert joiner.add(Prefix(1, 0, SEGMENT_BYTES, header), data) is not None
    assert joiner.add(Prefix(1, 5, 0, header), data) is None and len(joiner) == 5


def test_one_frame_may_always_come_however_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "MOST_PARTIAL_BYTES", SEGMENT_BYTES)
    joiner, header, data = Joiner(), Header(Kind.FORWARD, 4 * SEGMENT_BYTES), bytes(SEGMENT_BYTES)
    got = [joiner.add(Prefix(1, 7, n * SEGMENT_BYTES, header), data) for n in (3, 1, 0, 2)]
    assert got[:3] == [None] * 3 and got[3] is not None and len(got[3].payload) == 4 * SEGMENT_BYTES


def test_a_begun_frame_holds_what_came_and_no_more() -> None:
    begun = Begun()
    header, data = Header(Kind.FORWARD, 1 << 31), bytes(SEGMENT_BYTES)
    tracemalloc.start()
    joiners = [Joiner(begun) for _ in range(20)]
    for joiner in joiners:
        for number in range(3):
            joiner.add(Prefix(1, number, 0, header), bytes(data))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    sent = 60 * SEGMENT_BYTES
    assert begun.bytes == sent and peak < 1.2 * sent, "not the 2 GiB that each header announces"
    for joiner in joiners:
        joiner.clear()
    assert begun.bytes == 0


def test_begun_frames_are_counted_as_well_as_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "MOST_PARTIAL_FRAMES", 8)
    joiner, header = Joiner(), Header(Kind.FORWARD, SEGMENT_BYTES + 1)
    with pytest.raises(BadFrame, match="not whole"):
        for number in range(10):  # the last byte of each
            joiner.add(Prefix(1, number, SEGMENT_BYTES, header), b"x")
    assert len(joiner) <= 9


def test_over_all_links_whoever_holds_most_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "MOST_PARTIAL_BYTES_OF_ALL", 20 * SEGMENT_BYTES)
    begun, header, data = Begun(), Header(Kind.FORWARD, 2 * SEGMENT_BYTES), bytes(SEGMENT_BYTES)
    greedy, honest = [Joiner(begun) for _ in range(4)], Joiner(begun)
    refused = 0
    for number in range(10):
        for joiner in greedy:
            try:
                joiner.add(Prefix(1, number, 0, header), data)
            except BadFrame:
                refused += 1
    assert refused and begun.bytes <= 20 * SEGMENT_BYTES
    for number in range(4):  # its share of five holders
        assert honest.add(Prefix(1, number, 0, header), data) is None
    assert begun.bytes <= 24 * SEGMENT_BYTES


def test_a_begun_frame_that_does_not_go_on_is_stale() -> None:
    joiner, header, data = Joiner(), Header(Kind.FORWARD, 3 * SEGMENT_BYTES), bytes(SEGMENT_BYTES)
    joiner.add(Prefix(1, 0, 0, header), data, now=0.0)
    joiner.add(Prefix(1, 0, SEGMENT_BYTES, header), data, now=100.0)
    assert not joiner.stale(PARTIAL_SECONDS + 99.0) and joiner.stale(PARTIAL_SECONDS + 101.0)
