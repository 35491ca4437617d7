"""Faults on purpose: what they are named by, and when they happen."""

from __future__ import annotations

import os
import signal

import pytest

from peers.faults import Fault, Phase
from protocol.blob import Blob, BlobKey, BlobKind, Meta
from protocol.effects import SendChunk, SendOffer
from protocol.errors import UserError
from protocol.events import ChunkArrived
from protocol.view import Replica, View
from protocol.work import Verb

Happened = list[signal.Signals]


@pytest.fixture
def happened(monkeypatch: pytest.MonkeyPatch) -> Happened:
    """The signals that this process would have sent itself."""
    sent: Happened = []

    def kill(pid: int, number: signal.Signals) -> None:
        assert pid == os.getpid()
        sent.append(number)

    monkeypatch.setattr("peers.faults.os.kill", kill)
    return sent


def test_a_fault_is_a_phase_a_number_and_a_signal() -> None:
    assert Fault.parse("reduction@12") == Fault(Phase.REDUCTION, 12, signal.SIGKILL)
    assert Fault.parse("donor@3:stop") == Fault(Phase.DONOR, 3, signal.SIGSTOP)


@pytest.mark.parametrize("text", ["", "reduction", "reduction@", "reduction@-1", "lunch@3", "applied@3:nap"])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="expected a fault PHASE@NUMBER"):
        Fault.parse(text)


@pytest.mark.parametrize(
    ("phase", "before", "verb"),
    [
        ("before-forward", True, Verb.FORWARD),
        ("after-forward", False, Verb.FORWARD),
        ("after-backward", False, Verb.BACKWARD),
        ("reduction", False, Verb.PART),
        ("applied", False, Verb.APPLY),
    ],
)
def test_it_happens_at_its_phase_of_the_first_step_that_comes_to_it(
    happened: Happened, phase: str, before: bool, verb: Verb
) -> None:
    fault = Fault.parse(f"{phase}@5")
    for step, verbs in ((4, set(Verb)), (6, set(Verb) - {verb})):
        for other in verbs:
            fault.before(other, step)
            fault.after(other, step)
    assert not happened
    fault.before(verb, 6)
    assert len(happened) == before
    fault.after(verb, 6)
    assert happened == [signal.SIGKILL]


def test_it_happens_once(happened: Happened) -> None:
    fault = Fault.parse("applying@5:stop")
    for step in (5, 6, 5):
        fault.reached(Phase.APPLYING, step)
    assert happened == [signal.SIGSTOP]


def test_no_fault_never_happens(happened: Happened) -> None:
    fault = Fault()
    for phase in Phase:
        fault.reached(phase, 0)
    for verb in Verb:
        fault.before(verb, 0)
        fault.after(verb, 0)
    fault.came(ChunkArrived("x", b"blob", 0, b""), lacking=True)
    assert not happened


def test_a_donor_counts_the_chunks_of_its_own_stages_states(happened: Happened) -> None:
    stages = ((Replica("other", ("a",)),), (Replica("donor", ("b",)), Replica("newcomer", ("c",))))
    view = View(1, 1, 9, stages)
    state, part = (Blob.of(BlobKey(kind, 1, 4), b"x" * 10, Meta()) for kind in (BlobKind.STATE, BlobKind.PART))
    copy = Blob.of(BlobKey(BlobKind.STATE, 1, 8), b"y" * 10, Meta())
    fault = Fault.parse("donor@2")
    for peer, blob in (("newcomer", state), ("newcomer", part), ("other", copy)):
        fault.sent(SendOffer(peer, 1, blob.offer), view)
    for peer, blob in (("newcomer", part), ("other", copy), ("newcomer", state), ("newcomer", part)):
        fault.sent(SendChunk(peer, blob.offer.id, 0, b""), view)
    assert not happened
    fault.sent(SendChunk("newcomer", state.offer.id, 1, b""), view)
    assert happened == [signal.SIGKILL]


def test_a_newcomer_counts_chunks_until_it_has_its_state(happened: Happened) -> None:
    fault = Fault.parse("newcomer@2")
    for lacking in (True, False, False):
        fault.came(ChunkArrived("donor", b"blob", 0, b""), lacking)
    assert not happened
    fault.came(ChunkArrived("donor", b"blob", 1, b""), lacking=True)
    assert happened == [signal.SIGKILL]
