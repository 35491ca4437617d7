"""A stage at a peer: its machine, its toy model, and the effects carried out, as the real stage worker does.

It lives from the view that gives the peer this place until another place is given, or the process ends.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from protocol.blob import Blob, BlobKey, BlobKind, Meta
from protocol.credits import CreditMeter
from protocol.effects import (
    Accuse,
    AskChunk,
    Compute,
    Differs,
    Effect,
    FindState,
    Irreplaceable,
    KeepState,
    LostTrack,
    Ready,
    Reduce,
    Refuse,
    Send,
    SendChunk,
    SendGone,
    SendOffer,
    SendTaken,
    SendUsed,
    SendWant,
    StepApplied,
    WantBlob,
)
from protocol.events import (
    Arrived,
    BlobGone,
    BlobWanted,
    ChunkArrived,
    ChunkAsked,
    Computed,
    CreditsChanged,
    Event,
    Offered,
    Spoiled,
    Stalled,
    StateFound,
    Taken,
    Used,
    ViewChanged,
    Wanted,
)
from protocol.place import Rules
from protocol.stage_machine import StageMachine
from protocol.stall import StallTimer
from protocol.view import View
from protocol.work import Schedule, Verb
from simulated_swarm.toy_model import GARBAGE, Garbage, NotFinite, ToyStage, ToyState, added, pack, unpack

if TYPE_CHECKING:
    from simulated_swarm.peer import Peer

SHORTEST_COMPUTE = 0.01
STALL_SECONDS = 3.0
CODEC = 5


class Host:
    """`place` is (epoch, stage, start) of the peer's entry in the view that began it."""

    def __init__(self, peer: Peer, view: View, place: tuple[int, int, int], misled: int = 0) -> None:
        self.peer, self.place = peer, place
        self._swarm, self._world = peer.swarm, peer.swarm.scenario
        _, self.stage, start = place
        run = self._world.run
        state = ToyState.first(run, self.stage) if start == 0 else None
        if start == view.restored and state is None:
            state = peer.disk.read(self.stage, start)
            if state is not None and view.hash_of(self.stage, start) not in ("", state.hash):
                peer.disk.forget(self.stage, start)
                self._swarm.counts["wrong files set aside"] += 1
                state = None
        self.model = ToyStage(run, self.stage, state or ToyState(0))
        self.machine = StageMachine(peer.name, rules_of(peer), start, lacking=state is None, misled=misled)
        self.stall = StallTimer(STALL_SECONDS, self._swarm.clock.now)
        self.computing: Compute | None = None
        self._credits = CreditMeter(self._world.window)
        self.rerouted = self.views = 0  # the step that was under way when the newest view came; its views
        self.done = 0
        self.seconds: list[float] = []
        self.weights = "" if state is None else state.hash
        self.tainted = False
        self.failure: tuple[object, ...] | None = None
        self.computed: Counter[tuple[int, str]] = Counter()
        self._waits_for = ""

    @property
    def here(self) -> bool:
        """Whether it is still the peer's, in a process that lives."""
        return self.peer.alive and self.peer.host is self

    @property
    def idle(self) -> bool:
        """Whether it waits for others."""
        return self.machine.waits_for() != "nothing" or self.machine.finished

    def beat(self) -> None:
        """Time has passed."""
        if self.failure is not None:
            self.peer.tell(self.failure)
        if self._waits_for != "nothing" and not self.machine.finished and self.stall.due(self._swarm.clock.now):
            self._swarm.counts["stalls"] += 1
            self.feed(Stalled())

    def feed(self, event: Event) -> None:
        """Let the protocol handle `event`, and carry out what it decides."""
        self._swarm.trace(self.peer.name, event)
        fetches = isinstance(event, ChunkArrived) and self.machine.lacking
        if fetches and self._swarm.faults.phase(self.peer, "as a newcomer that fetches"):
            return
        before = self.machine.view
        if isinstance(event, ViewChanged):
            self.views = 1 + (self.views if self.rerouted == self.machine.applied + 1 else 0)
            self.rerouted = self.machine.applied + 1
        credits = self._credits.note(event, self.machine.applied + 1, self._swarm.clock.now)
        if credits is not None and self._world.measured:
            self._swarm.counts["credits below the window"] += credits < self._world.window
            self.feed(CreditsChanged(credits))
        try:
            effects = self.machine.handle(event)
        except Exception as error:
            self._swarm.checks.fail(f"{self.peer.name} raised {error!r} at {event}", error)
        self._swarm.checks.bounds(self, before)
        for effect in effects:
            self._swarm.trace(self.peer.name, effect)
            self._perform(effect)
            if not self.here:
                return
        waits_for = self.machine.waits_for()
        if waits_for != self._waits_for:
            self._waits_for = waits_for
            self.stall.progressed(self._swarm.clock.now)

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Compute():
                self._start(effect)
            case Refuse(peer, reason, stale):
                self._swarm.checks.refused(self, effect)
                if stale:
                    self.peer.send(peer, ("view", self.peer.view))
                del reason
            case StepApplied(step):
                self._swarm.checks.applied(self, effect)
                self._swarm.faults.applied(step)
                self.peer.report()
            case KeepState(blob):
                self._swarm.counts["copies kept"] += 1
                self.peer.write(blob.key.stage, blob.key.step, self.peer.handed_out(ToyState.unpack(bytes(blob.data))))
            case FindState(peer, key):
                self._swarm.clock.after(self._compute_time(), lambda: self._found(peer, key))
            case Ready(step, weights):
                self._swarm.checks.ready(self, step, weights)
                self.peer.report()
            case Differs(step, hashes):
                self._swarm.counts["differs"] += 1
                self.peer.tell(("differs", step, dict(hashes)))
            case Accuse(peer, reason, state):
                self._swarm.counts["accused"] += 1
                self.peer.tell(("accuse", peer, reason, state))
            case Irreplaceable(epoch, step, reason):
                self._swarm.counts["irreplaceable"] += 1
                self.peer.tell(("irreplaceable", epoch, step, reason))
            case LostTrack(reason):
                self._swarm.counts["lost track"] += 1
                self.peer.tell(("lost track", reason))
            case _:
                self._send(effect)

    def _send(self, effect: Effect) -> None:
        name = self.peer.name
        match effect:
            case Send(peer, kind, view, step, microbatch, _, payload):
                self._swarm.checks.sent(self, effect)
                payload = GARBAGE if payload is not None and self.peer.spoils() else payload
                self.peer.send(peer, Arrived(name, kind, view, step, microbatch, payload, CODEC), 500)
            case SendOffer(peer, view):
                self.peer.send(peer, Offered(name, view, self.peer.offers(effect).offer))
            case AskChunk(peer, blob, index):
                self.peer.send(peer, ChunkAsked(name, blob, index))
            case SendChunk(peer, blob, index, data):
                if self._swarm.faults.phase(self.peer, "as a donor of chunks"):
                    return
                self.peer.send(peer, ChunkArrived(name, blob, index, bytes(data)), 200 + len(data))
            case SendTaken(peer, blob):
                self.peer.send(peer, Taken(name, blob))
            case SendWant(peer, view, step, forward, backward):
                self.peer.send(peer, Wanted(name, view, step, forward, backward))
            case SendUsed(peer, view, step, microbatch):
                self.peer.send(peer, Used(name, view, step, microbatch))
            case WantBlob(peer, view, key):
                self.peer.send(peer, BlobWanted(name, view, key))
            case SendGone(peer, view, key):
                self.peer.send(peer, BlobGone(name, view, key))
            case _:
                self._swarm.checks.fail(f"{name} asks for {effect}, which nobody can do")

    # Computing

    def _start(self, work: Compute) -> None:
        self._swarm.checks.starts(self, work)
        verb = work.action.verb
        phase = {Verb.FORWARD: "before a forward", Verb.PART: "during PART", Verb.APPLY: "during APPLY"}.get(verb)
        phase = phase or {Verb.STATE: "during STATE", Verb.LOAD: "during LOAD"}.get(verb)
        self.computing = work
        seconds = self._compute_time()
        if verb in (Verb.FORWARD, Verb.BACKWARD):
            self.seconds.append(seconds)
        self._swarm.clock.after(seconds, self.peer.unless_frozen(lambda: self._ends(work)))
        if phase:
            self._swarm.faults.phase(self.peer, phase)
        if (
            verb is Verb.APPLY
            and self.machine.view
            and self.peer.name in self.machine.view.followers(self.stage, work.step)
        ):
            self._swarm.faults.phase(self.peer, "while it follows")

    def _ends(self, work: Compute) -> None:
        if not self.here or self.computing is not work:
            return
        self.computing = None
        try:
            made = self._compute(work)
        except NotFinite as error:
            self._halt(work, str(error))
            return
        except Garbage as garbage:
            sender = work.sender or _maker_of_garbage(work)
            self._swarm.counts["spoiled"] += 1
            self.feed(Spoiled(work.action, sender, str(garbage)))
            return
        except AssertionError as error:
            self._swarm.checks.fail(f"{self.peer.name} cannot do {work}: {error}", error)
        self.done += 1
        phase = {Verb.FORWARD: "after a forward", Verb.BACKWARD: "after a backward"}.get(work.action.verb, "")
        if work.action.verb is Verb.APPLY:
            if not self._checkpoint(work.step):
                return
            phase = "between APPLY and the offers"
        if not phase or not self._swarm.faults.phase(self.peer, phase):
            self.feed(Computed(work.action, made))

    def _halt(self, work: Compute, reason: str) -> None:
        """As the real one: it stands still until the coordinator has decided, and says why again and again."""
        self._swarm.counts["not finite"] += 1
        self.computing, self.failure = work, ("not finite", reason, self.place[0], work.step)
        self.peer.tell(self.failure)

    def _compute(self, work: Compute) -> object:
        model, microbatch = self.model, work.action.microbatch
        if (work.step, self.stage) in self._world.run.not_finite and _finds_out(work):
            raise NotFinite(f"a number of step {work.step} is not finite")
        match work.action.verb:
            case Verb.FORWARD:
                return model.forward(work.step, microbatch, _checked(work.payload))
            case Verb.BACKWARD:
                return model.backward(work.step, microbatch, _checked(work.payload))
            case Verb.PART:
                return self._part(work)
            case Verb.APPLY:
                return self._apply(work)
            case Verb.RESET:
                self._swarm.counts["resets" if work.payload is None else "drops"] += 1
                model.reset(work.payload)
                return None
            case Verb.STATE:
                state = self.peer.handed_out(model.state)
                return Blob.of(BlobKey(BlobKind.STATE, self.stage, work.step), state.pack(), Meta(weights=state.hash))
            case _:
                return self._load(work)

    def _part(self, work: Compute) -> Blob:
        model = self.model
        assert sorted(model.gathered) == list(work.payload), f"gathered are {model.gathered}"
        sums = [GARBAGE, 0, 0] if self.peer.spoils() else model.sums
        losses = tuple((m, float(m)) for m in model.gathered) if model.is_last else ()
        meta = Meta(tuple(work.payload), losses, model.state.hash)
        return Blob.of(BlobKey(BlobKind.PART, self.stage, work.step), pack(sums), meta)

    def _apply(self, work: Compute) -> Blob | None:
        reduce = work.payload
        assert isinstance(reduce, Reduce)
        if reduce.skip:
            self._swarm.checks.passes_over(self, work)
            self._swarm.counts["steps passed over"] += 1
            self.model.clear()
            self.weights = self.model.state.hash
            return None
        self._swarm.checks.covers(self, work)
        sums = added([unpack(part.data) for part in reduce.parts]) if reduce.parts else list(self.model.sums)
        losses = tuple(loss for part in reduce.parts for loss in part.offer.meta.losses)
        self.model.apply(work.step, sums)
        self.weights = self.model.state.hash
        if not reduce.keep:
            return None
        return Blob.of(BlobKey(BlobKind.TOTAL, self.stage, work.step), pack(sums), Meta(losses=losses))

    def _checkpoint(self, step: int) -> bool:
        """Write the stage's own file, on the same thread as APPLY. Whether the process has lived so long."""
        view = self.machine.view
        assert view is not None
        if step % self._world.checkpoint_every and step < view.last_step:
            return True
        if self._swarm.faults.phase(self.peer, "during a checkpoint"):
            return False
        self.peer.disk.write(self.stage, step, self.model.state, view.skipped)
        return True

    def _load(self, work: Compute) -> str:
        self.model.state = ToyState.unpack(bytes(work.payload.data))
        self.model.clear()
        self.weights = self.model.state.hash
        return self.weights

    def _found(self, peer: str, key: BlobKey) -> None:
        if not self.here:
            return
        state = self.peer.disk.read(key.stage, key.step)
        state = None if state is None else self.peer.handed_out(state)
        blob = None if state is None else Blob.of(key, state.pack(), Meta(weights=state.hash))
        self.feed(StateFound(peer, key, blob))

    def _compute_time(self) -> float:
        return self.peer.slowness * self.peer.rng.uniform(SHORTEST_COMPUTE, self._world.slowest_compute)


def _finds_out(work: Compute) -> bool:
    """It shows in one backward, or only in the update."""
    skips = isinstance(work.payload, Reduce) and work.payload.skip
    found = Verb.BACKWARD if work.step % 2 else Verb.APPLY
    return work.action.verb is found and not skips


def _maker_of_garbage(work: Compute) -> str:
    for peer, part in zip(work.payload.givers, work.payload.parts, strict=False):
        try:
            unpack(part.data)
        except Garbage:
            return str(peer)
    return "nobody"


def rules_of(peer: Peer) -> Rules:
    """The rules of the run, which are the same at all."""
    world = peer.swarm.scenario
    run = world.run
    return Rules(
        run.count,
        world.window,
        lambda key: run.state_bytes if key.kind is BlobKind.STATE else 24,
        lambda step: 0 if step % world.checkpoint_every else world.copies,
        Schedule.GPIPE if world.gpipe else Schedule.ONE_F_ONE_B,
    )


def _checked(payload: int | None) -> int | None:
    if payload == GARBAGE:
        raise Garbage("the numbers are not below the prime")
    return payload
