"""A whole pipeline in one thread: real stage machines, a virtual clock, and a network that loses, repeats and reorders.

Everything is drawn from the seed, so a failure repeats:

    python tests/simulation/simulator.py --seed 17 [--replicas 2] [--stop] [--stall-timer] [--trace]

What the machines compute is a toy model, exact and cheap: stage s holds one number w_s of the integers modulo a prime,
and maps x to w_s * x. The last stage's loss is (y - target)^2 / 2. Two things make it a sharp test:

  - Gradients are gathered as `sum = MIX * sum + gradient`, which depends on their order as a sum of floats does, only
    more so: a microbatch that is lost, repeated, swapped, or computed on other weights changes everything after it.
  - The modulus keeps numbers small, however many stages and steps there are.

Every `move_every` steps the step has a basis microbatch, as `protocol.basis_microbatch` tells: the last stage answers
it with a number made of all gradients of the steps applied since the last one, in their order; it goes up from stage to
stage; and each stage multiplies its weight by it after the update of that step, neither earlier nor later.

Replicas of a stage average at APPLY: the simulated APPLY of a replica ends when all replicas of its stage have begun
theirs, and they tell each other what they have gathered and the basis that one of them was sent. `StageMachine` itself
knows nothing of that.
"""

from __future__ import annotations

import argparse
import hashlib
import heapq
import random
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from protocol.frame import Kind
from protocol.route import route
from protocol.stage_machine import (
    Arrived,
    Compute,
    Computed,
    Effect,
    Event,
    Refuse,
    Send,
    StageMachine,
    Stalled,
    StepApplied,
    ViewChanged,
)
from protocol.stall import StallTimer
from protocol.view import Replica, View
from protocol.work import APPLY, Action, Verb

PRIME = (1 << 61) - 1
MIX = 1_000_003
RATE = 12_345
CODEC = 5
SHORTEST_COMPUTE = 0.01
STALL_SECONDS, HEARTBEAT_SECONDS = 2.0, 1.0
MOST_SECONDS = 20_000.0


class PlainTimer:
    """Asks again every `patience` seconds without progress. Has the methods of `protocol.stall.StallTimer`."""

    def __init__(self, patience: float, now: float) -> None:
        self._patience, self._next = patience, now + patience

    def progressed(self, now: float) -> None:
        self._next = now + self._patience

    def due(self, now: float) -> bool:
        is_due = now >= self._next
        if is_due:
            self._next = now + self._patience
        return is_due


class SimulationFailed(AssertionError):
    """A rule was broken. The message ends with the command that replays it."""


@dataclass(frozen=True)
class Scenario:
    """One simulated run, a function of its seed.

    Attributes:
        replicas: how many peers serve each stage.
        loss, duplicate: chances for each frame.
        slowest_link: seconds; each frame's delay is drawn anew, so frames overtake each other.
        stop: the view changes in the middle, to an earlier last step.
        renumber: how many more views come that change nothing but their number.
        outages: how often the link of one pair of neighbours drops everything for a while, and then comes back.
        barrier: replicas of a stage average; without, each goes on alone (and equality is not checked).
        move_every: every so many steps the basis moves; 0 for never.
        stall_timer: peers ask again when `protocol.stall.StallTimer` says so, and not simply every two seconds.
    """

    seed: int
    replicas: tuple[int, ...]
    microbatches: int
    window: int
    applied: int
    steps: int
    loss: float
    duplicate: float
    slowest_link: float
    slowest_compute: float
    stop: bool = False
    renumber: int = 0
    outages: int = 0
    barrier: bool = True
    move_every: int = 0
    stall_timer: bool = False

    @classmethod
    def drawn(cls, seed: int, most_replicas: int = 1, stop: bool = False, barrier: bool = True) -> Scenario:
        """The scenario of `seed`."""
        rng = random.Random(f"scenario {seed}")
        lossless = not barrier or rng.random() < 0.25
        return cls(
            seed=seed,
            replicas=tuple(rng.randint(1, most_replicas) for _ in range(rng.randint(1, 5))),
            microbatches=rng.randint(1, 6),
            window=rng.randint(1, 5),
            applied=rng.choice([0, 0, 7]),
            steps=rng.randint(8, 12) if stop else rng.randint(1, 5),
            loss=0.0 if lossless else rng.uniform(0.0, 0.2),
            duplicate=rng.choice([0.0, 0.1, 0.3]),
            slowest_link=rng.choice([0.001, 0.05, 0.5]),
            slowest_compute=rng.choice([0.011, 0.05, 0.2]),
            stop=stop,
            renumber=rng.choice([0, 0, 1, 3]) if barrier else 0,
            outages=rng.choice([0, 0, 2]) if barrier else 0,
            barrier=barrier,
            move_every=rng.choice([0, 2, 3]) if barrier else 0,
        )

    def moves(self, step: int) -> bool:
        """Whether the basis moves at the end of `step`."""
        return self.move_every > 0 and step % self.move_every == 0

    def count(self, step: int) -> int:
        """The microbatches of `step`, the basis microbatch among them."""
        return self.microbatches + self.moves(step)

    @property
    def most(self) -> int:
        """Of any step."""
        return self.microbatches + (self.move_every > 0)

    def command(self) -> str:
        """What replays it."""
        flags = [f"--seed {self.seed}"]
        flags += [f"--replicas {max(self.replicas)}"] if max(self.replicas) > 1 else []
        flags += ["--stop"] if self.stop else []
        flags += [] if self.barrier else ["--no-barrier"]
        flags += ["--stall-timer"] if self.stall_timer else []
        return f"python tests/simulation/simulator.py {' '.join(flags)}"


# The toy model


def drawn_number(*what: object) -> int:
    """A fixed number for `what`, uniform modulo the prime."""
    return int.from_bytes(hashlib.blake2b(repr(what).encode(), digest_size=16).digest(), "little") % PRIME


def sample(seed: int, step: int, microbatch: int) -> tuple[int, int]:
    """The input and the target of a microbatch."""
    return drawn_number("x", seed, step, microbatch), drawn_number("target", seed, step, microbatch)


def first_weights(seed: int, stages: int) -> list[int]:
    """The weights that a run begins with."""
    return [drawn_number("w", seed, stage) for stage in range(stages)]


def updated(weight: int, sums: list[int], microbatches: int) -> int:
    """The weight after a step of gradient descent on the average of what all replicas have gathered."""
    return (weight - RATE * sum(sums) * pow(microbatches, -1, PRIME)) % PRIME


def new_basis(pulls: list[int]) -> int:
    """What the basis moves to when the last stage's replicas have gathered `pulls`; never 0."""
    return drawn_number("basis", *pulls) | 1


def sequential(scenario: Scenario, view: View, last_step: int) -> dict[int, list[int]]:
    """The weights after each step from `scenario.applied` to `last_step`, by one plain loop."""
    weights = first_weights(scenario.seed, len(view.stages))
    after = {scenario.applied: list(weights)}
    pulls = [0] * len(view.stages[-1])
    for step in range(scenario.applied + 1, last_step + 1):
        sums = [dict.fromkeys([r.peer for r in replicas], 0) for replicas in view.stages]
        for microbatch in range(scenario.microbatches):
            x, target = sample(scenario.seed, step, microbatch)
            inputs = [x]
            for weight in weights:
                inputs.append(inputs[-1] * weight % PRIME)
            gradient = inputs[-1] - target
            for stage, peer in reversed(list(enumerate(route(view, step, microbatch)))):
                sums[stage][peer] = (MIX * sums[stage][peer] + gradient * inputs[stage]) % PRIME
                gradient = gradient * weights[stage] % PRIME
        weights = [updated(w, list(s.values()), scenario.microbatches) for w, s in zip(weights, sums, strict=True)]
        if scenario.moves(step):
            weights = [w * new_basis(pulls) % PRIME for w in weights]
            pulls = [0] * len(pulls)
        else:
            pulls = [(MIX * pull + s) % PRIME for pull, s in zip(pulls, sums[-1].values(), strict=True)]
        after[step] = list(weights)
    return after


@dataclass
class ToyStage:
    """What a peer would hold in its memory: a weight, the gradient sum, the inputs that backwards need."""

    weight: int
    is_last: bool
    sum: int = 0
    inputs: dict[tuple[int, int], int] = field(default_factory=dict)
    pull: int = 0
    basis: int | None = None

    def forward(self, step: int, microbatch: int, x: int) -> int:
        assert (step, microbatch) not in self.inputs
        self.inputs[step, microbatch] = x
        return x * self.weight % PRIME

    def end_step(self, weight: int, basis: int | None) -> None:
        """The update is made; then the basis is switched, if there is a new one."""
        self.weight = weight if basis is None else weight * basis % PRIME
        self.pull = 0 if basis is not None else (MIX * self.pull + self.sum) % PRIME
        self.sum, self.basis = 0, None

    def backward(self, step: int, microbatch: int, gradient: int) -> int:
        x = self.inputs.pop((step, microbatch))
        self.sum = (MIX * self.sum + gradient * x) % PRIME
        return gradient * self.weight % PRIME


# The peers and the world


@dataclass
class Peer:
    """A machine, its model, and what the checks must know of it."""

    name: str
    machine: StageMachine
    model: ToyStage
    stall: StallTimer | PlainTimer
    computing: Compute | None = None
    computed: Counter[tuple[int, str]] = field(default_factory=Counter)
    last_backward: tuple[int, int] = (0, -1)
    waits_for: str = ""


class Simulation:
    """Runs a scenario to its end. `counts` tells what happened, so that a test can tell that something did."""

    def __init__(self, scenario: Scenario, trace: bool = False) -> None:
        self.scenario, self._trace = scenario, trace
        self.rng = random.Random(f"run {scenario.seed}")
        self.now, self._order = 0.0, 0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._dead_links: set[frozenset[str]] = set()
        self.counts: Counter[str] = Counter()
        stages = tuple(
            tuple(Replica(f"s{stage}r{r}", (), self.rng.choice([0.5, 1.0, 2.0])) for r in range(count))
            for stage, count in enumerate(scenario.replicas)
        )
        first = scenario.applied + 1
        self.views = [View(1, first, scenario.applied + scenario.steps, stages)]
        weights = first_weights(scenario.seed, len(stages))
        timer = StallTimer if scenario.stall_timer else PlainTimer
        self.peers = {
            replica.peer: Peer(
                replica.peer,
                StageMachine(replica.peer, scenario.count, scenario.window, scenario.applied),
                ToyStage(weights[stage], stage == len(stages) - 1),
                timer(STALL_SECONDS, 0.0),
            )
            for stage, replicas in enumerate(stages)
            for replica in replicas
        }

    @property
    def last_step(self) -> int:
        """Where the newest view stops."""
        return self.views[-1].last_step

    def run(self) -> Simulation:
        """Run to the end and check everything."""
        self._spread_view(self.views[0], 3 * self.scenario.slowest_link)
        for peer in self.peers.values():
            self._at(self.rng.uniform(0, HEARTBEAT_SECONDS), lambda peer=peer: self._beat(peer))
        length = self.scenario.steps * self.scenario.microbatches * SHORTEST_COMPUTE * 2
        if self.scenario.stop:
            self._at(self.rng.uniform(0, length), self._stop)
        for _ in range(self.scenario.renumber):
            self._at(self.rng.uniform(0, length), self._renumber)
        for _ in range(self.scenario.outages):
            self._at(self.rng.uniform(0, length), self._cut_a_link)
        while self._due:
            self.now, _, happen = heapq.heappop(self._due)
            if self.now > MOST_SECONDS:
                waits = {peer.name: (peer.machine.applied, peer.machine.waits_for()) for peer in self.peers.values()}
                self._fail(f"still not at step {self.last_step} after {MOST_SECONDS:.0f} s; {waits}")
            happen()
        self._check_end()
        return self

    # Time

    def _at(self, delay: float, happen: Callable[[], None]) -> None:
        self._order += 1
        heapq.heappush(self._due, (self.now + delay, self._order, happen))

    def _done(self) -> bool:
        newest = self.views[-1].number
        return all(
            p.machine.finished and p.machine.view is not None and p.machine.view.number == newest
            for p in self.peers.values()
        )

    def _beat(self, peer: Peer) -> None:
        if self._done():
            return
        self._at(HEARTBEAT_SECONDS, lambda: self._beat(peer))
        if peer.waits_for != "nothing" and peer.stall.due(self.now):
            self._feed(peer, Stalled())
            self.counts["stalls"] += 1

    # The coordinator

    def _spread_view(self, view: View, longest: float) -> None:
        for peer in self.peers.values():
            self._at(self.rng.uniform(0, longest), lambda peer=peer: self._feed(peer, ViewChanged(view)))
            if self.rng.random() < 0.3:  # an old record from the DHT, much later
                self._at(self.rng.uniform(0, 5), lambda peer=peer: self._feed(peer, ViewChanged(view)))

    def _stop(self) -> None:
        """An earlier last step, with the margin that `protocol.membership` leaves: nobody can pass it before it knows.

        Each step costs a stage at least 2 M computations, if it has one replica.
        """
        margin_steps = self.rng.randint(1, 4)
        newest = max(peer.machine.applied for peer in self.peers.values())
        last = newest + 1 + margin_steps
        if last >= self.last_step:
            return
        self.counts["stops"] += 1
        self._issue(last, margin_steps * 2 * self.scenario.microbatches * SHORTEST_COMPUTE)

    def _renumber(self) -> None:
        if not self._done():
            self.counts["renumbered"] += 1
            self._issue(self.last_step, 0.05)

    def _issue(self, last_step: int, longest: float) -> None:
        self.views.append(replace(self.views[-1], number=len(self.views) + 1, last_step=last_step))
        self._spread_view(self.views[-1], longest)

    # The network

    def _cut_a_link(self) -> None:
        if len(self.views[0].stages) == 1:
            return
        stage = self.rng.randrange(len(self.views[0].stages) - 1)
        pair = [self.rng.choice(self.views[0].stages[s]).peer for s in (stage, stage + 1)]
        self._dead_links.add(frozenset(pair))
        self._at(self.rng.uniform(0.1, 4.0), lambda: self._mend(pair))

    def _mend(self, pair: list[str]) -> None:
        self._dead_links.discard(frozenset(pair))
        for name, other in (pair, pair[::-1]):
            self._feed(self.peers[name], Stalled(other))
        self.counts["mended"] += 1

    def _post(self, sender: Peer, send: Send) -> None:
        arrived = Arrived(sender.name, send.kind, send.view, send.step, send.microbatch, send.payload, CODEC)
        receiver = self.peers[send.peer]
        for _ in range(2 if self.rng.random() < self.scenario.duplicate else 1):
            if frozenset((sender.name, send.peer)) in self._dead_links or self.rng.random() < self.scenario.loss:
                self.counts["lost"] += 1
                continue
            self._at(self.rng.uniform(0, self.scenario.slowest_link), lambda: self._feed(receiver, arrived))

    # One peer

    def _feed(self, peer: Peer, event: Event) -> None:
        if self._trace:
            sys.stdout.write(f"{self.now:9.4f} {peer.name} {event}\n")
        newer = peer.machine.view is not None and isinstance(event, Arrived)
        if newer and event.view > peer.machine.view.number:  # type: ignore[union-attr]
            self.counts["of a newer view"] += 1
        try:
            effects = peer.machine.handle(event)
        except Exception as error:
            self._fail(f"{peer.name} raised {error!r} at {event}")
        self._check_bounds(peer)
        for effect in effects:
            self._perform(peer, effect)
        if peer.machine.waits_for() != peer.waits_for:
            peer.waits_for = peer.machine.waits_for()
            peer.stall.progressed(self.now)

    def _perform(self, peer: Peer, effect: Effect) -> None:
        if self._trace:
            sys.stdout.write(f"{'':9} {peer.name}     -> {effect}\n")
        match effect:
            case Compute():
                self._check_compute(peer, effect)
                peer.computing = effect
                if effect.action == APPLY and self.scenario.barrier:
                    self._average(peer, effect)
                else:
                    self._at(self._compute_time(), lambda: self._compute_ends(peer))
            case Send():
                self._check_send(peer, effect)
                self._post(peer, effect)
            case Refuse(_, reason):
                kind = "old view" if "is over" in reason else "early" if "too early" in reason else "bad"
                self.counts[f"refused: {kind}"] += 1
                self._check(kind != "bad", f"{peer.name} refused an honest frame: {reason}")
            case StepApplied(step, last):
                view = peer.machine.view
                self._check(peer.machine.applied == step, f"{peer.name} has applied {peer.machine.applied} at {effect}")
                self._check(view is not None and last == (step >= view.last_step), f"{peer.name}: {effect}, {view}")

    def _compute_time(self) -> float:
        return self.rng.uniform(SHORTEST_COMPUTE, self.scenario.slowest_compute)

    def _average(self, peer: Peer, work: Compute) -> None:
        """End this APPLY once every replica of the stage has begun its own."""
        replicas = [self.peers[replica.peer] for replica in self.views[0].stages[peer.machine.stage]]
        if all(r.computing is not None and r.computing == work for r in replicas):
            weight = updated(peer.model.weight, [r.model.sum for r in replicas], self.scenario.microbatches)
            same = all(replica.model.weight == peer.model.weight for replica in replicas)
            self._check(same, f"the replicas of stage {peer.machine.stage} differ before {work}")
            told = [replica.model.basis for replica in replicas if replica.model.basis is not None]
            moves = self.scenario.moves(work.step)
            self._check(len(told) == moves, f"the replicas of stage {peer.machine.stage} were told {told} at {work}")
            self.counts["moves"] += moves
            for replica in replicas:
                replica.model.end_step(weight, told[0] if told else None)
                self._at(self._compute_time(), lambda replica=replica: self._compute_ends(replica))

    def _compute_ends(self, peer: Peer) -> None:
        work = peer.computing
        assert work is not None
        peer.computing = None
        self._feed(peer, Computed(work.action, self._compute(peer, work)))

    def _compute(self, peer: Peer, work: Compute) -> object:
        step, microbatch, model = work.step, work.action.microbatch, peer.model
        if microbatch == self.scenario.microbatches:
            return self._compute_basis(peer, work)
        x, target = sample(self.scenario.seed, step, microbatch)
        match work.action.verb:
            case Verb.FORWARD:
                y = model.forward(step, microbatch, x if peer.machine.stage == 0 else work.payload)
                return None if model.is_last else y
            case Verb.BACKWARD:
                y = model.inputs[step, microbatch] * model.weight
                gradient = model.backward(step, microbatch, y - target if model.is_last else work.payload)
                return None if peer.machine.stage == 0 else gradient
            case _:
                if not self.scenario.barrier:
                    model.weight, model.sum = updated(model.weight, [model.sum], self.scenario.microbatches), 0
                return None

    def _compute_basis(self, peer: Peer, work: Compute) -> object:
        if work.action.verb is Verb.FORWARD:
            return None if peer.model.is_last else ""
        replicas = self.views[0].stages[-1]
        pulls = [self.peers[replica.peer].model.pull for replica in replicas]
        peer.model.basis = new_basis(pulls) if peer.model.is_last else work.payload
        return None if peer.machine.stage == 0 else peer.model.basis

    # The rules

    def _check_bounds(self, peer: Peer) -> None:
        machine, m, w = peer.machine, self.scenario.most, self.scenario.window
        kept, held = len(machine._outbox), len(machine._early)
        self._check(kept <= 2 * m, f"{peer.name} keeps {kept} of at most {2 * m} frames")
        self._check(held <= 8 * m, f"{peer.name} holds {held} of at most {8 * m} frames")
        if machine.step is not None:
            flight = machine.step.in_flight()
            self._check(flight <= w + 1, f"{peer.name} has {flight} microbatches in flight, the window is {w}")

    def _check_compute(self, peer: Peer, work: Compute) -> None:
        step, microbatch, verb = work.step, work.action.microbatch, work.action.verb
        said = f"{peer.name} starts {work.action} of step {step}"
        self._check(peer.computing is None, f"{said} while {peer.computing} runs")
        self._check(step == peer.machine.applied + 1, f"{said} after {peer.machine.applied} applied")
        self._check(step <= self.last_step, f"{said}, but the last is {self.last_step}")
        peer.computed[step, str(work.action)] += 1
        self._check(peer.computed[step, str(work.action)] == 1, f"{said} again")
        if verb is Verb.APPLY:
            mine = self._mine(peer, step)
            finished = [m for m in mine if peer.computed[step, f"F{m}"] and peer.computed[step, f"B{m}"]]
            self._check(finished == mine, f"{said} with {finished} done of {mine}")
            return
        self._check(microbatch in self._mine(peer, step), f"{said}, which is routed elsewhere")
        if verb is Verb.BACKWARD:
            self._check(peer.last_backward < (step, microbatch), f"{said} after B{peer.last_backward}")
            self._check(peer.computed[step, f"F{microbatch}"] == 1, f"{said} before its forward")
            peer.last_backward = (step, microbatch)
        needs_input = peer.machine.stage > 0 if verb is Verb.FORWARD else not peer.model.is_last
        self._check(needs_input == (work.payload is not None), f"{said} on {work.payload}")
        self._check(work.codec == (CODEC if needs_input else 0), f"{said} with codec {work.codec}")

    def _check_send(self, peer: Peer, send: Send) -> None:
        view, stage = peer.machine.view, peer.machine.stage
        assert view is not None
        self._check(send.view == view.number, f"{peer.name} sends {send} under view {view.number}")
        self._check(send.stage == stage + (1 if send.kind is Kind.FORWARD else -1), f"{peer.name} sends {send}")
        self._check(send.peer == route(view, send.step, send.microbatch)[send.stage], f"{send} goes astray")

    def _mine(self, peer: Peer, step: int) -> list[int]:
        stage = self.views[0].stage_of(peer.name)
        assert stage is not None
        return [m for m in range(self.scenario.count(step)) if route(self.views[0], step, m)[stage] == peer.name]

    def _check_end(self) -> None:
        last = self.last_step
        for peer in self.peers.values():
            machine = peer.machine
            there = machine.finished and machine.applied == last
            self._check(there, f"{peer.name} ends at {machine.applied}, not {last}")
            self._check(peer.computing is None and not peer.model.inputs, f"{peer.name} ends with work left")
            expected = Counter(
                (step, str(action))
                for step in range(self.scenario.applied + 1, last + 1)
                for m in [*self._mine(peer, step), None]
                for action in ([APPLY] if m is None else [Action(Verb.FORWARD, m), Action(Verb.BACKWARD, m)])
            )
            self._check(peer.computed == expected, f"{peer.name} computed {peer.computed - expected} too much")
        if self.scenario.barrier:
            weights = sequential(self.scenario, self.views[0], last)[last]
            for peer in self.peers.values():
                self._check(peer.model.weight == weights[peer.machine.stage], f"{peer.name} has another weight")
        self.counts["runs"] += 1

    def _check(self, holds: bool, otherwise: str) -> None:
        if not holds:
            self._fail(otherwise)

    def _fail(self, what: str) -> None:
        raise SimulationFailed(
            f"{what}\n  at {self.now:.4f} s of {self.scenario}\n  replay: {self.scenario.command()} --trace"
        )


def main() -> None:
    """Replay one seed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--replicas", type=int, default=1, help="most replicas of a stage")
    parser.add_argument("--stop", action="store_true", help="change the view to an earlier last step")
    parser.add_argument("--no-barrier", action="store_true", help="replicas do not average")
    parser.add_argument("--stall-timer", action="store_true", help="ask again when protocol.stall says so")
    parser.add_argument("--trace", action="store_true", help="print every event and effect")
    asked = parser.parse_args()
    scenario = Scenario.drawn(asked.seed, asked.replicas, asked.stop, not asked.no_barrier)
    scenario = replace(scenario, stall_timer=asked.stall_timer)
    simulation = Simulation(scenario, asked.trace).run()
    sys.stdout.write(f"{scenario}\nends at {simulation.now:.2f} s: {dict(simulation.counts)}\n")


if __name__ == "__main__":
    main()
