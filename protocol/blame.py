"""Whose word against whose: replicas with unlike weights, payloads that cannot be used, states that they are not.

What is held against whom is in `protocol.quarrels`; here is what follows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from protocol.losses import gone, turned_away, vacate
from protocol.membership_events import Accused, Differs, Effect, short_peer
from protocol.quarrels import MOST_TIMES
from protocol.run_state import Differing, RunState

SECOND_WORD_SECONDS = 30.0  # all replicas see the same parts, so all of them say that weights differ


def accused(run: RunState, event: Accused) -> list[Effect]:
    """One of two neighbours is wrong. Who does no work yet has nothing to lose: its word waits until it does."""
    if event.peer == event.accused:
        return []
    if event.state:
        return _misled(run, event)
    if not _are_neighbours(run, event.peer, event.accused):
        return []
    if not _works(run, event.peer):
        run.conduct.quarrels.keep(event.peer, event.accused, event.reason)
        return []
    return _quarrel(run, event.peer, event.accused, f"cannot use what it sent: {event.reason}")


def _misled(run: RunState, event: Accused) -> list[Effect]:
    """A wrong state: nobody need give way, the accuser asks others for it. No copy is fetched from the accused."""
    member = run.members[event.peer]
    if member.stage is None or event.accused not in run.members:
        return []
    run.doubt(event.accused, event.peer)
    if not _works(run, event.peer):
        run.conduct.quarrels.keep(event.peer, event.accused, event.reason)
        return []
    return _convict(run, event.peer, event.accused, event.reason)


def _works(run: RunState, peer: str) -> bool:
    return any(r.peer == peer for r, _ in run.roster.workers(run.members[peer].stage))


def _are_neighbours(run: RunState, one: str, other: str) -> bool:
    """Whether they exchange tensors, parts or states. Who has just been excluded had a place a moment ago."""
    here, there = run.members[one].stage, run.place_of(other)
    return here is not None and there is not None and abs(here - there) <= 1


def _quarrel(run: RunState, accuser: str, accused: str, what: str) -> list[Effect]:
    """`accuser` says of `accused` that it is wrong: the one that is known to be is turned away, or one gives way."""
    quarrels = run.conduct.quarrels
    quarrels.note(accuser, accused)
    said = f"peer {short_peer(accuser)} {what}"
    wrong = quarrels.wrong(accuser, accused)
    if wrong:
        others = "it accuses one peer after the other of sending what it cannot use"
        return turned_away(run, wrong, said if wrong == accused else others)
    loser = _gives_way(run, accuser, accused)
    if not loser:
        return []
    quarrels.gave_way(loser, accused if loser == accuser else accuser)
    reason = said if loser == accused else f"it {what.replace('it sent', f'peer {short_peer(accused)} sent')}"
    if quarrels.times(accuser, accused) >= MOST_TIMES:
        return turned_away(run, loser, f"{reason}, again and again")
    return gone(run, [loser], reason)


def _gives_way(run: RunState, accuser: str, accused: str) -> str:
    """Who of the two loses its place; "": they are apart already."""
    seats = {peer: m.stage for peer in (accuser, accused) if (m := run.members.get(peer)) and m.stage is not None}
    if len(seats) < 2:
        return ""
    # The one without which its stage can go on.
    spare = [peer for peer, stage in seats.items() if set(run.roster.stayers(stage)) - {peer}]
    if len(spare) == 1:
        return spare[0]
    # They met again: the other one. At first the one that came later, which has shown less.
    turn = run.conduct.quarrels.next_to_give_way(accuser, accused)
    return turn or max(seats, key=list(run.members).index)


def differs(run: RunState, event: Differs, now: float) -> list[Effect]:
    """Replicas of a stage have unlike weights: the majority keeps its place; of as many, those first in the view.

    What most had reported of the step before counts more. What a replica says against itself is believed, and what two
    say of a third; one's word alone is an accusation.
    """
    reporter = run.members[event.peer]
    if run.view is None or reporter.stage is None:
        return []
    stage = reporter.stage
    there = [r.peer for r, _ in run.roster.workers(stage)]
    hashes = {peer: event.hashes[peer] for peer in there if peer in event.hashes}
    named = [weights for weights in hashes.values() if weights]  # who names none is wrong, for nobody could compare
    if event.peer not in there or len(set(hashes.values())) < 2 or not named:
        return []
    matter = run.differing.get(stage)
    if matter is None or (matter.step, matter.view) != (event.step, run.view.number):
        matter = run.differing[stage] = Differing(event.step, run.view.number, now)
    matter.words[event.peer] = hashes
    return _resync(run, stage, matter, there)


def _resync(run: RunState, stage: int, matter: Differing, there: Sequence[str]) -> list[Effect]:
    """Those whose weights are the wrong ones for sure fetch the state anew."""
    known = run.agreement.most(stage, matter.step - 1)
    said = _said(matter, there)
    for peer in [
        p for p, weights in said.items() if not weights and run.agreement.reported(stage, matter.step - 1, known, p)
    ]:
        said[peer] = known  # it need not have conceded
    odd = _odd(said, known, matter.words.keys() >= set(there))
    says = Counter(p for p in odd for hashes in matter.words.values() if hashes.get(p) != _right(hashes, p, odd))
    sure = [peer for peer in odd if says[peer] > 1 or peer in matter.words]
    if not sure:
        return []
    del run.differing[stage]
    often = [peer for peer in sure if run.conduct.resynced(peer, matter.step)]
    reason = f"its weights differ from the other replicas' before step {matter.step}"
    effects = vacate(run, [peer for peer in sure if peer not in often], reason, follow=True)
    for peer in often:
        effects += turned_away(run, peer, f"{reason}, again and again: is its hardware unlike theirs?")
    return effects


def _said(matter: Differing, there: Sequence[str]) -> dict[str, str]:
    """Who has which weights, in the view's order: by its own word, or else by others'."""
    found: dict[str, str] = {}
    for peer in there:
        words = [matter.words[peer]] if peer in matter.words else list(matter.words.values())
        for hashes in words:
            found |= {peer: hashes[peer]} if peer in hashes else {}
    return found


def _right(hashes: Mapping[str, str], peer: str, odd: Collection[str]) -> str | None:
    """The weights that `hashes` says others than the odd ones have; its own word for `peer` where it says none."""
    return next((weights for other, weights in hashes.items() if other not in odd), hashes.get(peer))


def _odd(hashes: Mapping[str, str], known: str, complete: bool) -> tuple[str, ...]:
    """Whose weights are wrong; as long as as many have others, nobody's until all have spoken: one may concede."""
    named = Counter(weights for weights in hashes.values() if weights)  # in the view's order
    if not named:
        return ()
    counts = named.most_common(2)
    tied = len(counts) > 1 and counts[0][1] == counts[1][1] and known not in named
    if tied and not complete:
        return ()
    right = known if known in named else counts[0][0]
    return tuple(peer for peer, weights in hashes.items() if weights != right)


def settle(run: RunState, now: float) -> list[Effect]:
    """What is due: words that nobody seconded, and those of newcomers that work by now."""
    effects: list[Effect] = []
    for stage, matter in list(run.differing.items()):
        if now - matter.since < SECOND_WORD_SECONDS:
            continue
        del run.differing[stage]
        for reporter, hashes in matter.words.items():
            other = next((peer for peer, weights in hashes.items() if weights != hashes.get(reporter)), "")
            if reporter in run.members and other and run.view is not None and run.view.number == matter.view:
                effects += _quarrel(run, reporter, other, f"says that its weights differ before step {matter.step}")
    for newcomer in run.conduct.quarrels.kept():
        if newcomer not in run.members:
            run.conduct.quarrels.release(newcomer)
        elif _works(run, newcomer):
            for peer, reason in run.conduct.quarrels.release(newcomer).items():
                if newcomer in run.members and peer in run.members:
                    effects += _convict(run, newcomer, peer, reason)
    return effects


def _convict(run: RunState, newcomer: str, accused: str, reason: str) -> list[Effect]:
    """What a newcomer said when it followed: nobody need give way, for it has found what it needed elsewhere."""
    quarrels = run.conduct.quarrels
    quarrels.note(newcomer, accused)
    wrong = quarrels.wrong(newcomer, accused)
    return turned_away(run, wrong, f"what it hands out cannot be used: {reason}") if wrong else []
