"""The exchange: windows, several donors, donors that go, are silent or give wrong bytes, what is kept and for whom."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from protocol.blob import CHUNK_BYTES, Blob, BlobKey, BlobKind, Meta
from protocol.effects import AskChunk
from protocol.exchange import MOST_WRONG, WINDOW, Arrival, Exchange

KEY = BlobKey(BlobKind.STATE, 1, 4)
CHUNKS = 30


def blob(salt: int = 0, chunks: int = CHUNKS, key: BlobKey = KEY) -> Blob:
    """Each chunk is another byte, and the last is short."""
    whole = b"".join(bytes([(salt * 101 + index) % 256]) * CHUNK_BYTES for index in range(chunks))
    return Blob.of(key, whole[: -CHUNK_BYTES // 2], Meta(weights=str(salt)))


BLOB = blob()


def give(exchange: Exchange, ask: AskChunk, source: Blob = BLOB) -> Arrival:
    """The donor answers."""
    return exchange.arrived(ask.peer, ask.blob, ask.index, source.chunk(ask.index))


def pump(exchange: Exchange, asks: list[AskChunk], silent: str = "", answered: list[AskChunk] | None = None) -> Arrival:
    """Answer all questions in order, and those that follow, until the blob is whole or nothing is left."""
    asks = list(asks)
    arrival = Arrival([])
    while asks:
        ask = asks.pop(0)
        if ask.peer != silent:
            if answered is not None:
                answered.append(ask)
            arrival = give(exchange, ask)
            asks += arrival.asks
            if arrival.blob is not None:
                break
    return arrival


# Fetching


def test_a_donor_is_asked_for_a_window_and_for_one_more_with_each_that_comes() -> None:
    exchange = Exchange()
    asks = exchange.fetch(BLOB.offer, "ann")
    assert asks == [AskChunk("ann", BLOB.offer.id, index) for index in range(WINDOW)]
    assert give(exchange, asks[3]).asks == [AskChunk("ann", BLOB.offer.id, WINDOW)]
    assert exchange.progress(KEY) == (1, CHUNKS)


def test_all_chunks_make_the_blob_and_nothing_is_kept() -> None:
    exchange = Exchange()
    seen: list[AskChunk] = []
    arrival = pump(exchange, exchange.fetch(BLOB.offer, "ann"), answered=seen)
    assert arrival.blob is not None and bytes(arrival.blob.data) == bytes(BLOB.data)
    assert arrival.donors == ("ann",) and arrival.blob.offer == BLOB.offer
    assert sorted(ask.index for ask in seen) == list(range(CHUNKS)), "each is asked for once"
    assert len(exchange) == 0 and exchange.progress(KEY) == (0, 0)


def test_a_chunk_that_comes_after_it_was_given_up_counts_and_is_not_asked_for_again() -> None:
    exchange = Exchange()
    asks = exchange.fetch(BLOB.offer, "ann")
    again = exchange.again()
    late = next(ask for ask in asks if ask not in again)
    given: list[AskChunk] = []
    arrival = give(exchange, late)
    assert pump(exchange, [*again, *arrival.asks], answered=given).blob == BLOB
    assert late.index not in {ask.index for ask in given} and len(given) == CHUNKS - 1


def test_two_donors_share_the_work() -> None:
    exchange = Exchange()
    asks = exchange.fetch(BLOB.offer, "ann")
    asks += exchange.fetch(BLOB.offer, "ben")
    assert Counter(ask.peer for ask in asks) == {"ann": WINDOW, "ben": WINDOW}
    seen: list[AskChunk] = []
    arrival = pump(exchange, asks, answered=seen)
    given = Counter(ask.peer for ask in seen)
    assert arrival.blob is not None and set(arrival.donors) == {"ann", "ben"}
    assert given["ann"] + given["ben"] == CHUNKS and min(given.values()) > CHUNKS // 3


def test_an_offer_that_comes_twice_asks_for_nothing_more() -> None:
    exchange = Exchange()
    exchange.fetch(BLOB.offer, "ann")
    assert exchange.fetch(BLOB.offer, "ann") == []


def test_a_donor_has_one_window_for_all_its_blobs_and_the_older_goes_first() -> None:
    exchange, other = Exchange(), blob(1, 3, replace(KEY, step=5))
    asks = exchange.fetch(BLOB.offer, "ann")
    assert exchange.fetch(other.offer, "ann") == []
    while exchange.progress(KEY) != (CHUNKS - WINDOW, CHUNKS):
        asks += give(exchange, asks.pop(0)).asks
    assert {ask.blob for ask in asks} == {BLOB.offer.id}
    assert [ask.blob for ask in give(exchange, asks.pop(0)).asks] == [other.offer.id]


def test_what_nobody_asked_for_changes_nothing() -> None:
    exchange = Exchange()
    asks = exchange.fetch(BLOB.offer, "ann")
    chunk = BLOB.chunk(0)
    for donor, name, index, data in [
        ("eve", BLOB.offer.id, 0, chunk),
        ("ann", b"?" * 16, 0, chunk),
        ("eve", BLOB.offer.id, 0, b"wrong"),
    ]:
        assert exchange.arrived(donor, name, index, data) == Arrival([])
    assert exchange.progress(KEY) == (0, CHUNKS)
    give(exchange, asks[0])
    assert give(exchange, asks[0]) == Arrival([]), "it is here"
    assert exchange.progress(KEY) == (1, CHUNKS)


# Donors that fail


def test_what_was_asked_of_a_donor_that_went_is_asked_elsewhere_and_nothing_twice() -> None:
    exchange = Exchange()
    asks = exchange.fetch(BLOB.offer, "ann") + exchange.fetch(BLOB.offer, "ben")
    for ask in asks[:4]:
        asks += give(exchange, ask).asks
    lost = {ask.index for ask in asks[4:] if ask.peer == "ann"}
    assert len(lost) == WINDOW
    assert exchange.keep_peers(["ben", "cat"]) == [], "his window is full"
    seen: list[AskChunk] = []
    arrival = pump(exchange, [ask for ask in asks if ask.peer == "ben"], answered=seen)
    assert arrival.blob is not None and arrival.donors == ("ben",)
    assert sorted(ask.index for ask in seen) == list(range(4, CHUNKS)) and {ask.peer for ask in seen} == {"ben"}


def test_a_fetch_without_donors_goes_on_where_it_was_when_another_offers_the_same() -> None:
    exchange = Exchange()
    asks = exchange.fetch(BLOB.offer, "ann")
    for ask in asks[:5]:
        give(exchange, ask)
    exchange.keep_peers(["ben"])
    assert not exchange.has_donors(KEY) and exchange.progress(KEY) == (5, CHUNKS)
    seen: list[AskChunk] = []
    arrival = pump(exchange, exchange.fetch(BLOB.offer, "ben"), answered=seen)
    assert sorted(ask.index for ask in seen) == list(range(5, CHUNKS)) and arrival.blob is not None
    assert bytes(arrival.blob.data) == bytes(BLOB.data)


def test_a_silent_donor_gets_one_chunk_at_a_time_and_the_other_all_else() -> None:
    exchange = Exchange()
    exchange.fetch(BLOB.offer, "ann")
    asks = exchange.fetch(BLOB.offer, "ben")
    for ask in asks:
        give(exchange, ask)  # ben answers, ann does not
    again = exchange.again()
    counts = Counter(ask.peer for ask in again)
    assert counts["ann"] <= 1
    exchange.arrived("ann", BLOB.offer.id, 0, BLOB.chunk(0))
    assert exchange._in_vain == {"ben"}, "who answers is trusted again"


def test_the_whole_blob_comes_though_one_of_its_donors_never_answers() -> None:
    exchange = Exchange()
    asks = exchange.fetch(BLOB.offer, "ann") + exchange.fetch(BLOB.offer, "ben")
    arrival, stalls = Arrival([]), 0
    while arrival.blob is None:
        arrival = pump(exchange, asks, silent="ann")
        asks, stalls = exchange.again(), stalls + 1
        assert stalls < 4
    assert bytes(arrival.blob.data) == bytes(BLOB.data)


def test_a_donor_that_is_silent_twice_is_none_until_it_offers_again() -> None:
    """It may have given the blob up: whoever misses it asks whether it is there, and is told that it is gone."""
    exchange = Exchange()
    exchange.fetch(BLOB.offer, "ann")
    assert len(exchange.again()) == 1 and exchange.has_donors(KEY)
    assert exchange.again() == [] and not exchange.has_donors(KEY) and not exchange.is_fetching(BLOB.offer.id)
    asks = exchange.fetch(BLOB.offer, "ann")
    assert len(asks) == 1 and exchange.is_fetching(BLOB.offer.id)
    assert len(give(exchange, asks[0]).asks) == WINDOW, "it answers: a whole window"


def test_a_link_that_is_back_is_asked_again_and_others_are_left_alone() -> None:
    exchange = Exchange()
    asks = exchange.fetch(BLOB.offer, "ann")
    exchange.fetch(BLOB.offer, "ben")
    again = exchange.link_back("ann")
    assert {ask.peer for ask in again} == {"ann"} and len(again) == WINDOW
    late = give(exchange, asks[0])
    assert late.blob is None and exchange.progress(KEY) == (1, CHUNKS), "what had been under way still counts"
    assert exchange.link_back("nobody") == []


def test_a_wrong_digest_costs_the_donor_its_place_and_the_chunk_comes_from_another() -> None:
    exchange = Exchange()
    asks = exchange.fetch(BLOB.offer, "ann") + exchange.fetch(BLOB.offer, "ben")
    arrival = exchange.arrived("ann", BLOB.offer.id, 0, b"\xff" * CHUNK_BYTES)
    assert "chunk 0" in arrival.wrong and "does not have the offered digest" in arrival.wrong and not arrival.blob
    assert exchange.arrived("ann", BLOB.offer.id, 0, BLOB.chunk(0)) == Arrival([]), "not asked any more"
    whole = pump(exchange, [ask for ask in asks if ask.peer == "ben"])
    assert whole.blob is not None and bytes(whole.blob.data) == bytes(BLOB.data) and whole.donors == ("ben",)


def test_a_donor_that_offers_another_blob_under_the_key_is_asked_for_that_one() -> None:
    exchange, other = Exchange(), blob(1)
    exchange.fetch(BLOB.offer, "ann")
    asks = exchange.fetch(other.offer, "ann")
    assert {ask.blob for ask in asks} == {other.offer.id} and len(exchange) == 1
    assert exchange.arrived("ann", BLOB.offer.id, 0, BLOB.chunk(0)) == Arrival([])


def test_two_donors_of_unlike_blobs_under_one_key_are_two_fetches() -> None:
    """Parts of a step have one key: each maker's is another blob."""
    exchange, other = Exchange(), blob(1)
    exchange.fetch(BLOB.offer, "ann")
    exchange.fetch(other.offer, "ben")
    assert len(exchange) == 2 and exchange.is_fetching(BLOB.offer.id) and exchange.is_fetching(other.offer.id)
    exchange.refused("ann", KEY)
    assert not exchange.is_fetching(BLOB.offer.id) and exchange.has_donors(KEY)


def test_however_often_a_donor_changes_its_mind_or_gives_nonsense_one_fetch_is_kept() -> None:
    exchange = Exchange()
    for salt in range(50):
        offered = blob(salt, 2)
        for ask in exchange.fetch(offered.offer, "ann")[:1]:
            give(exchange, ask, offered)
        exchange.arrived("ann", offered.offer.id, 1, b"nonsense")
        assert len(exchange) == 1


def test_who_refuses_is_not_asked_again_for_that_key() -> None:
    exchange, other = Exchange(), blob(1, 2, replace(KEY, step=5))
    exchange.fetch(BLOB.offer, "ann")
    exchange.fetch(other.offer, "ann")
    asks = exchange.refused("ann", KEY)
    assert {ask.blob for ask in asks} == {other.offer.id} and not exchange.has_donors(KEY)
    assert exchange.refused("eve", KEY) == []


# Giving


def test_chunks_are_given_of_what_is_here_only() -> None:
    exchange = Exchange()
    exchange.shelve(BLOB)
    assert exchange.chunk(BLOB.offer.id, 29) == BLOB.chunk(29)
    assert exchange.chunk(BLOB.offer.id, 30) is None and exchange.chunk(BLOB.offer.id, -1) is None
    assert exchange.chunk(b"?" * 16, 0) is None
    assert exchange.shelved(KEY) == BLOB and exchange.shelved(replace(KEY, step=5)) is None


def test_a_blob_with_an_audience_goes_when_all_have_taken_it() -> None:
    exchange = Exchange()
    exchange.shelve(BLOB, ["ann"])
    exchange.shelve(BLOB, ["ben"])
    exchange.taken(BLOB.offer.id, "ann")
    exchange.taken(BLOB.offer.id, "ann")
    exchange.taken(BLOB.offer.id, "eve")
    exchange.taken(b"?" * 16, "ben")
    assert exchange.shelved(KEY) is not None
    exchange.taken(BLOB.offer.id, "ben")
    assert exchange.shelved(KEY) is None and len(exchange) == 0


def test_a_blob_for_all_is_kept_until_it_is_past() -> None:
    exchange, later = Exchange(), blob(1, 2, replace(KEY, step=9))
    exchange.shelve(BLOB)
    exchange.shelve(later)
    exchange.taken(BLOB.offer.id, "ann")
    exchange.keep_peers([])
    assert len(exchange) == 2
    exchange.forget(lambda key: key.step < 9)
    assert exchange.shelved(KEY) is None and exchange.shelved(later.key) == later


def test_an_audience_that_is_gone_is_not_waited_for() -> None:
    exchange = Exchange()
    exchange.shelve(BLOB, ["ann", "ben"])
    exchange.keep_peers(["ben"])
    exchange.taken(BLOB.offer.id, "ben")
    assert len(exchange) == 0
    exchange.shelve(BLOB, ["ann"])
    exchange.keep_peers(["ben"])
    assert len(exchange) == 0


def test_what_is_past_is_not_fetched_and_what_is_abandoned_stays_on_the_shelf() -> None:
    exchange = Exchange()
    exchange.shelve(BLOB)
    exchange.fetch(blob(1).offer, "ann")
    exchange.abandon(lambda key: key == KEY)
    assert len(exchange) == 1 and exchange.shelved(KEY) == BLOB
    exchange.fetch(blob(1).offer, "ann")
    exchange.forget(lambda key: key == KEY)
    assert len(exchange) == 0


def test_a_donor_that_is_alone_and_gives_wrong_bytes_is_asked_again_and_then_known_for_it() -> None:
    """A peer that handed out a part with a byte changed in each chunk held its stage up for ever."""
    exchange = Exchange()
    small = blob(chunks=2)
    asks, arrivals = exchange.fetch(small.offer, "eve"), []
    while asks:
        ask = asks.pop(0)
        arrivals.append(exchange.arrived(ask.peer, ask.blob, ask.index, b"wrong"))
        asks += arrivals[-1].asks
    assert [arrival.hopeless for arrival in arrivals].index(True) == MOST_WRONG - 1
    assert arrivals[MOST_WRONG - 1].of == KEY and not exchange.has_donors(KEY)


def test_one_wrong_chunk_of_a_donor_that_is_alone_is_a_chunk_more() -> None:
    exchange = Exchange()
    first, *asks = exchange.fetch(BLOB.offer, "ann")
    arrival = exchange.arrived(first.peer, first.blob, first.index, b"noise")
    assert not arrival.hopeless and arrival.wrong
    assert pump(exchange, [*asks, *arrival.asks]).blob == BLOB


def test_right_chunks_in_between_make_wrong_ones_forgotten() -> None:
    exchange = Exchange()
    asks = exchange.fetch(BLOB.offer, "ann")
    for _ in range(2 * MOST_WRONG):
        ask = asks.pop(0)
        arrival = exchange.arrived(ask.peer, ask.blob, ask.index, b"noise")
        assert not arrival.hopeless
        asks += [*arrival.asks, *give(exchange, asks.pop(0)).asks]
