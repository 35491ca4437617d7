"""The exchange: what this peer offers, and what it fetches, chunk by chunk, from one or several donors. Pure, no clock.

    offered --> [ pending chunks ] --asked, at most WINDOW a donor--> [ under way ] --digest right--> [ here ] --> blob
                        ^                                                   |
                        +---- the donor went, refused, or nothing came -----+

A donor that was asked in vain gets one chunk at a time until it answers again, so that it does not hold the rest up.
After the second time it is no donor until it offers again: it may have given the blob up.
A chunk whose digest is wrong is asked for again elsewhere, and its donor no more for that blob; a donor that is alone
is asked again. One that has sent MOST_WRONG such chunks and no right one in between is to blame: no line does that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from protocol.blob import Blob, BlobKey, Offer, chunk_bytes, fits
from protocol.effects import AskChunk
from protocol.frame import Buffer

MOST_WRONG = 4  # wrong chunks of one donor, one after the other
WINDOW = 8  # chunks under way from one donor: 2 MiB, enough for 160 Mbit/s at a round trip of 100 ms


@dataclass(frozen=True, slots=True)
class Arrival:
    """What follows from a chunk: what to ask next, the blob if it is whole now, and who had offered it.

    `wrong`: what is wrong with it; `of`: of which blob it is then; `hopeless`: its donor sends nothing else.
    """

    asks: list[AskChunk]
    blob: Blob | None = None
    donors: tuple[str, ...] = ()
    wrong: str = ""
    of: BlobKey | None = None
    hopeless: bool = False


@dataclass(slots=True)
class _Fetch:
    offer: Offer
    pending: deque[int]
    donors: list[str] = field(default_factory=list)
    under_way: dict[int, str] = field(default_factory=dict)
    here: set[int] = field(default_factory=set)
    data: memoryview = field(init=False)

    def __post_init__(self) -> None:
        # Whole from the start, so that the last chunk need not copy all; the system gives pages as they are written.
        self.data = np.empty(self.offer.size, np.uint8).data

    def put(self, index: int, chunk: Buffer) -> None:
        """A chunk, whose digest is right."""
        start = index * chunk_bytes(self.offer.size)
        self.data[start : start + len(chunk)] = chunk
        self.here.add(index)


@dataclass(slots=True)
class _Shelved:
    blob: Blob
    audience: set[str]


class Exchange:
    """The blobs of one peer."""

    def __init__(self) -> None:
        self._shelf: dict[bytes, _Shelved] = {}
        self._fetches: dict[bytes, _Fetch] = {}
        self._in_vain: set[str] = set()
        self._wrong: dict[str, int] = {}  # by donor, since its last right chunk

    # Giving

    def shelve(self, blob: Blob, audience: Iterable[str] = ()) -> None:
        """Keep `blob` for others. With an audience it goes when all of those have taken it or are gone."""
        kept = self._shelf.setdefault(blob.offer.id, _Shelved(blob, set()))
        kept.audience |= set(audience)

    def shelved(self, key: BlobKey) -> Blob | None:
        """The blob under `key`."""
        return next((kept.blob for kept in self._shelf.values() if kept.blob.key == key), None)

    def forget(self, is_past: Callable[[BlobKey], bool]) -> None:
        """Neither keep nor fetch these any longer."""
        self._shelf = {name: kept for name, kept in self._shelf.items() if not is_past(kept.blob.key)}
        self.abandon(is_past)

    def abandon(self, is_past: Callable[[BlobKey], bool]) -> None:
        """Do not fetch these any longer; what is on the shelf stays."""
        self._fetches = {name: fetch for name, fetch in self._fetches.items() if not is_past(fetch.offer.key)}

    def __len__(self) -> int:
        """Blobs on the shelf, and fetches under way."""
        return len(self._shelf) + len(self._fetches)

    def chunk(self, blob: bytes, index: int) -> Buffer | None:
        """The bytes somebody asks for; None if they are not here."""
        kept = self._shelf.get(blob)
        return kept.blob.chunk(index) if kept and 0 <= index < len(kept.blob.offer.digests) else None

    def taken(self, blob: bytes, peer: str) -> None:
        """`peer` has all of it."""
        kept = self._shelf.get(blob)
        if kept is not None and peer in kept.audience:
            kept.audience.discard(peer)
            if not kept.audience:
                del self._shelf[blob]

    # Fetching

    def fetch(self, offer: Offer, donor: str) -> list[AskChunk]:
        """Get the blob, from this donor too. What it offered before under the same key does not hold any more.

        A fetch that has lost all its donors waits for another one of the same blob; one of another blob ends it, so
        that there are never more fetches under a key than donors.
        """
        for name, other in list(self._fetches.items()):
            if other.offer.key == offer.key and name != offer.id:
                if donor in other.donors:
                    self._part(other, donor)
                if not other.donors:
                    del self._fetches[name]
        fetch = self._fetches.get(offer.id)
        if fetch is None:  # made only now: it takes memory for the whole blob
            fetch = self._fetches[offer.id] = _Fetch(offer, deque(range(len(offer.digests))))
        if donor not in fetch.donors:
            fetch.donors.append(donor)
        return self._ask()

    def progress(self, key: BlobKey) -> tuple[int, int]:
        """Chunks here, and chunks in all, of the fetch under `key` that is furthest."""
        counts = [(len(f.here), len(f.offer.digests)) for f in self._fetches.values() if f.offer.key == key]
        return max(counts, default=(0, 0))

    def arrived(self, donor: str, blob: bytes, index: int, data: Buffer) -> Arrival:
        """A chunk came. One that nobody asked for, or that comes twice, changes nothing."""
        fetch = self._fetches.get(blob)
        if fetch is None or donor not in fetch.donors or index in fetch.here:
            return Arrival([])
        if not fits(fetch.offer, index, data):
            return self._wrong_chunk(fetch, donor, index)
        asked = fetch.under_way.pop(index, None)
        self._in_vain.discard(donor)
        self._wrong.pop(donor, None)
        fetch.put(index, data)
        if asked is None:  # it was asked in vain, and comes after all
            fetch.pending.remove(index)
        if len(fetch.here) < len(fetch.offer.digests):
            return Arrival(self._ask())
        del self._fetches[blob]
        return Arrival(self._ask(), Blob(fetch.offer, fetch.data), tuple(fetch.donors))

    def _wrong_chunk(self, fetch: _Fetch, donor: str, index: int) -> Arrival:
        self._wrong[donor] = self._wrong.get(donor, 0) + 1
        hopeless = self._wrong[donor] >= MOST_WRONG
        if hopeless:
            del self._wrong[donor]

        if hopeless or len(fetch.donors) > 1:
            self._part(fetch, donor)
        elif fetch.under_way.pop(index, None) is not None:
            fetch.pending.append(index)
        wrong = f"chunk {index} of {fetch.offer.key} does not have the offered digest"
        return Arrival(self._ask(), wrong=wrong, of=fetch.offer.key, hopeless=hopeless)

    def again(self) -> list[AskChunk]:
        """Nothing came for long: ask again for what is under way, others first."""
        silent = {donor for fetch in self._fetches.values() for donor in fetch.under_way.values()}
        for fetch in self._fetches.values():
            for donor in sorted(silent & {*fetch.under_way.values()}):
                if donor in self._in_vain:
                    self._part(fetch, donor)
                else:
                    self._give_back(fetch, donor)
        self._in_vain |= silent
        return self._ask()

    def link_back(self, donor: str) -> list[AskChunk]:
        """The link to `donor` was lost and is back: ask it again for what was under way."""
        for fetch in self._fetches.values():
            self._give_back(fetch, donor)
        return self._ask()

    def keep_peers(self, peers: Iterable[str]) -> list[AskChunk]:
        """Only these are left in the run: what was asked of others is asked elsewhere."""
        present = set(peers)
        self._in_vain &= present
        self._wrong = {donor: count for donor, count in self._wrong.items() if donor in present}
        for fetch in self._fetches.values():
            for donor in [donor for donor in fetch.donors if donor not in present]:
                self._part(fetch, donor)
        for name, kept in list(self._shelf.items()):
            if kept.audience and not kept.audience & present:
                del self._shelf[name]
            else:
                kept.audience &= present
        return self._ask()

    def refused(self, donor: str, key: BlobKey) -> list[AskChunk]:
        """`donor` no longer has it."""
        for fetch in self._fetches.values():
            if fetch.offer.key == key and donor in fetch.donors:
                self._part(fetch, donor)
        return self._ask()

    def is_fetching(self, blob: bytes) -> bool:
        """Whether anybody is being asked for this very blob."""
        return blob in self._fetches and bool(self._fetches[blob].donors)

    def has_donors(self, key: BlobKey) -> bool:
        """Whether anybody is being asked for it."""
        return any(fetch.donors for fetch in self._fetches.values() if fetch.offer.key == key)

    def _part(self, fetch: _Fetch, donor: str) -> None:
        fetch.donors.remove(donor)
        self._give_back(fetch, donor)

    def _give_back(self, fetch: _Fetch, donor: str) -> None:
        for index in sorted(i for i, who in fetch.under_way.items() if who == donor):
            del fetch.under_way[index]
            fetch.pending.append(index)

    def _ask(self) -> list[AskChunk]:
        """Fill every donor's window, the older fetches first."""
        loads: dict[str, int] = {}
        for fetch in self._fetches.values():
            for donor in fetch.under_way.values():
                loads[donor] = loads.get(donor, 0) + 1
        asks = []
        for fetch in self._fetches.values():
            while fetch.pending:
                freest = self._freest(fetch.donors, loads)
                if freest is None:
                    break
                index = fetch.pending.popleft()
                fetch.under_way[index] = freest
                loads[freest] = loads.get(freest, 0) + 1
                asks.append(AskChunk(freest, fetch.offer.id, index))
        return asks

    def _freest(self, donors: list[str], loads: dict[str, int]) -> str | None:
        room = {d: (1 if d in self._in_vain else WINDOW) - loads.get(d, 0) for d in donors}
        best = max(room, key=lambda donor: (room[donor], donor), default=None)
        return best if best is not None and room[best] > 0 else None
