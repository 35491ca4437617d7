"""The rules that must hold at every event, whatever happened. The first one that does not ends the run."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from protocol.effects import Compute, Reduce, Refuse, Send, StepApplied
from protocol.frame import Kind
from protocol.route import routes
from protocol.view import View
from protocol.work import Verb
from simulated_swarm.toy_model import ToyState, sequential

if TYPE_CHECKING:
    from simulated_swarm.host import Host
    from simulated_swarm.swarm import Swarm

KEPT_BLOBS = 24


class SimulationFailed(AssertionError):
    """A rule was broken. The message ends with the command that replays it."""


class Checks:
    """Compares everything with one plain loop."""

    def __init__(self, swarm: Swarm) -> None:
        self._swarm, self._scenario = swarm, swarm.scenario
        self._ended: set[int] = set()
        self._rights: dict[tuple[int, ...], list[list[ToyState]]] = {}

    def fail(self, what: str, cause: BaseException | None = None) -> NoReturn:
        """The run is wrong."""
        raise SimulationFailed(
            f"seed {self._scenario.seed} at {self._swarm.clock.now:.3f} s: {what}\n  replay: {self._scenario.command}"
        ) from cause

    def check(self, holds: bool, otherwise: str) -> None:
        """Fail unless it holds."""
        if not holds:
            self.fail(otherwise)

    # At a peer

    def bounds(self, host: Host, before: View | None) -> None:
        """What is kept stays bounded; views only get newer."""
        machine, run = host.machine, self._scenario.run
        most = run.microbatches + (run.move_every > 0)
        peers = len(self._swarm.peers)
        limits = {"tensors": 8 * most, "blobs": KEPT_BLOBS + 2 * peers, "early": (2 * most + 16) * (peers + 4)}
        # A view may bring a microbatch that is older than all in flight, which goes first; so may the next view.
        in_flight = most if self._scenario.gpipe else self._scenario.window + 1 + host.views
        said = f"{host.peer.name} has {machine.most_in_flight} microbatches in flight, at most {in_flight}"
        self.check(machine.most_in_flight <= in_flight, said)
        for name, kept in machine.kept.items():
            self.check(kept <= limits[name], f"{host.peer.name} keeps {kept} {name}, at most {limits[name]}")
        after = machine.view
        self.check(before is None or (after is not None and after.number >= before.number), "a view went back")

    def starts(self, host: Host, work: Compute) -> None:
        """A computation is legal here and now."""
        machine, step, action = host.machine, work.step, work.action
        said = f"{host.peer.name} starts {action} of step {step}"
        self.check(host.computing is None, f"{said} while {host.computing} runs")
        view = machine.view
        assert view is not None
        if action.verb in (Verb.STATE, Verb.LOAD):
            self.check(step == machine.applied, f"{said} after {machine.applied} applied")
            return
        self.check(step == machine.applied + 1, f"{said} after {machine.applied} applied")
        self.check(step <= view.last_step, f"{said}, but the last is {view.last_step}")
        if action.verb in (Verb.FORWARD, Verb.BACKWARD):
            count = self._scenario.run.count(step)
            routed = routes(view, host.stage, step, count)[action.microbatch]
            self.check(routed == host.peer.name, f"{said}, which is routed to {routed}")
            needs = host.stage > 0 if action.verb is Verb.FORWARD else not host.model.is_last
            self.check(needs == (work.payload is not None), f"{said} on {work.payload}")
        if action.verb is Verb.BACKWARD and host.rerouted != step:  # what a view adds comes after what is done
            done = host.model.gathered
            self.check(not done or done[-1] < action.microbatch, f"{said} after B{done[-1:]}")

    def passes_over(self, host: Host, work: Compute) -> None:
        """Only what nobody can do is passed over, and nothing of it is in any sum."""
        said = f"{host.peer.name} passes over step {work.step}"
        self.check(work.step in self._scenario.run.skipped, said)
        self.check(not host.model.gathered, f"{said} of which it has gathered {host.model.gathered}")

    def covers(self, host: Host, work: Compute) -> None:
        """What APPLY adds up has each microbatch of the step once."""
        assert isinstance(work.payload, Reduce)
        said = f"{host.peer.name} applies step {work.step}"
        count, parts = self._scenario.run.count(work.step), work.payload.parts
        if not parts:
            self.check(sorted(host.model.gathered) == list(range(count)), f"{said} of {host.model.gathered}")
        elif parts[0].key.kind == "part":
            covered = sorted(m for part in parts for m in part.offer.meta.covers)
            self.check(covered == list(range(count)), f"{said} of parts that cover {covered}, not {count} microbatches")
        if host.model.is_last and parts:
            lost = sorted(m for part in parts for m, _ in part.offer.meta.losses)
            self.check(lost == list(range(count)), f"{said} with the losses of {lost}, not of {count} microbatches")

    def applied(self, host: Host, effect: StepApplied) -> None:
        """The weights are those of the plain loop."""
        step, view = effect.step, host.machine.view
        self.check(host.machine.applied == step, f"{host.peer.name} has applied {host.machine.applied} at {effect}")
        self.check(view is not None and effect.last == (step >= view.last_step), f"{host.peer.name}: {effect}, {view}")
        self._same(host, step)
        passed = view is not None and view.skipped == self._scenario.run.skipped
        if step == self._scenario.steps and not host.tainted and passed:
            self._ended.add(host.stage)

    def ready(self, host: Host, step: int, weights: str) -> None:
        """A state that was loaded is right."""
        self._swarm.counts["states loaded"] += 1
        self.check(weights == host.model.state.hash, f"{host.peer.name} is ready with {weights}")
        self._same(host, step)

    def sent(self, host: Host, send: Send) -> None:
        """A tensor goes where the route says."""
        view = host.machine.view
        assert view is not None
        self.check(send.view == view.number, f"{host.peer.name} sends {send} under view {view.number}")
        self.check(send.stage == host.stage + (1 if send.kind is Kind.FORWARD else -1), f"{send} skips a stage")
        count = self._scenario.run.count(send.step)
        to = routes(view, send.stage, send.step, count)[send.microbatch]
        self.check(to == send.peer, f"{host.peer.name} sends {send}, which is routed to {to}")

    def refused(self, host: Host, refusal: Refuse) -> None:
        """Counted, by kind."""
        reason = refusal.reason
        self._swarm.trace(host.peer.name, reason)
        for kind in ("is over", "too early", "no room", "not in", "expected", "digest", "neither lacks", "is not here"):
            if kind in reason:
                self._swarm.counts[f"refused: {kind}"] += 1
                return
        self._swarm.counts["refused: other"] += 1

    def turned_away(self, name: str, reason: str) -> None:
        """Beside a hostile peer nobody else pays for what it does."""
        peer, scenario = self._swarm.peers[name], self._scenario
        wrong = peer.bad or peer.hostile or any(fault.kind == "flip" for fault in scenario.faults)
        said = f"{name} was turned away beside a hostile peer: {reason}"
        self.check(wrong or not scenario.hostile or "too slow" in reason, said)

    def _misled(self, host: Host, step: int) -> None:
        """It began from, or applied, what the hostile peer handed out: it must be found out before it does work."""
        self._swarm.counts["misled by a hostile peer"] += 1
        self._swarm.trace("MISLED", f"{host.peer.name} at stage {host.stage} after step {step}")
        host.tainted = True

    # At the end

    def ended(self) -> None:
        """Every stage had somebody who came to the last step, with the weights of the plain loop."""
        honest = {p.host.stage for p in self._swarm.peers.values() if p.alive and p.host is not None and not p.hostile}
        stages = set(range(self._scenario.run.stages)) & (honest if self._scenario.hostile else set(range(99)))
        self.check(self._ended >= stages, f"the last step is applied at stages {sorted(self._ended)} only")

    def _right(self, host: Host) -> list[list[ToyState]]:
        """What the plain loop makes of the history that `host` knows. Who finds out late may have done a step first."""
        view = host.machine.view
        skipped = () if view is None else view.skipped
        if skipped not in self._rights:
            self._rights[skipped] = sequential(self._scenario.run, self._scenario.steps, skipped)
        return self._rights[skipped]

    def _same(self, host: Host, step: int) -> None:
        right = self._right(host)[step][host.stage]
        if self._scenario.hostile and host.model.state != right:
            self._misled(host, step)
        if host.tainted:
            self._swarm.counts["steps applied on a flipped bit"] += 1
            return
        self.check(
            host.model.state == right,
            f"{host.peer.name} has {host.model.state} at stage {host.stage} after step {step}, not {right}",
        )
