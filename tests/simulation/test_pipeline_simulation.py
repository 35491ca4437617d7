"""Swarms in simulation: every seed must end with the weights of a plain loop, whatever died, froze, left or came back.

The simulator checks the rules at every event (`simulated_swarm.checks`); here are seeds, and a look at the sum of what
happened, lest the swarm was treated too kindly to test anything. `python scripts/simulate --seeds 10000` runs more.
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from simulated_swarm.checks import SimulationFailed
from simulated_swarm.commands import LEEWAY_SECONDS
from simulated_swarm.scenario import PHASES, PlannedFault, Scenario
from simulated_swarm.swarm import Swarm
from simulated_swarm.toy_model import ToyRun, ToyStage, ToyState

ROOT = Path(__file__).parents[2]
SEEDS = 40


def calm(seed: int, **changes: object) -> Scenario:
    """A scenario without faults, to which a test adds what it is about."""
    drawn = Scenario.drawn(seed)
    quiet = {"loss": 0.0, "corrupt": 0.0, "joins": (), "faults": (), "bad": False, "slow_peers": 0.0, "hostile": False}
    finite = replace(drawn.run, not_finite=())
    return replace(drawn, **{"run": finite, **quiet, **changes})  # type: ignore[arg-type]


def test_every_seed_ends_with_the_weights_of_a_plain_loop() -> None:
    seen: Counter[str] = Counter()
    for seed in range(SEEDS):
        seen += Swarm(Scenario.drawn(seed)).run().counts
    assert seen["runs"] == SEEDS
    assert seen["peers killed"] > SEEDS and seen["restores"] > SEEDS / 4 and seen["replicas lost by a view"] > SEEDS / 4
    assert seen["planned views"] > SEEDS / 4 and seen["states loaded"] > SEEDS / 4 and seen["copies kept"] > SEEDS
    assert seen["coordinator restarted"] > SEEDS / 10 and seen["links mended"] > SEEDS / 2
    assert seen["steps passed over"] > SEEDS / 4 and seen["not finite"] > SEEDS / 10
    assert seen["of a newer view"] > SEEDS and seen["refused: is over"] > SEEDS and seen["stalls"] > SEEDS


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("kind", ["kill", "freeze"])
def test_a_peer_that_dies_or_stops_in_any_phase_changes_nothing(phase: str, kind: str) -> None:
    """A newcomer makes the phases of learners happen; a killed peer that comes back, those of restarts."""
    struck = 0
    for seed in range(3):
        fault = PlannedFault(kind, 2, phase, 5.0)
        scenario = calm(seed, replicas=(2, 2), steps=12, faults=(fault,), joins=(3.0,), checkpoint_every=3)
        run = replace(scenario.run, stages=2)
        seen = Swarm(replace(scenario, run=run)).run().counts
        assert seen["runs"] == 1
        struck += seen[f"{kind} {phase}"]
    assert struck, "the phase never came"


def test_a_flipped_bit_costs_a_replica_its_place_and_nothing_else() -> None:
    scenario = calm(4, replicas=(3, 3), steps=60, faults=(PlannedFault("flip", 3, "during PART"),))
    seen = Swarm(replace(scenario, run=replace(scenario.run, stages=2))).run().counts
    assert seen["differs"] >= 1 and seen["places changed"] == 1 and seen["states loaded"] == 1


def test_without_faults_nothing_is_asked_again_and_no_view_changes() -> None:
    for seed in range(20):
        seen = Swarm(calm(seed, slowest_link=0.01, slowest_compute=0.02, bandwidth=1e6)).run().counts
        assert seen["stalls"] == 0 and seen["views"] == 1, seed


def test_a_hostile_peer_costs_nobody_else_anything() -> None:
    """No honest peer is turned away (`checks.turned_away`), weights are right, steps take twice as long at most."""
    seen: Counter[str] = Counter()
    for seed in range(20):
        scenario = calm(seed, hostile=True)
        beside, alone = (Swarm(replace(scenario, hostile=hostile)).run() for hostile in (True, False))
        assert beside.clock.now <= 2 * alone.clock.now + LEEWAY_SECONDS, seed
        seen += beside.counts
    assert seen["runs"] == 20 and seen["turned away"] >= 5, "it was found out"
    said = ("fails", "accuses", "accuses_of_states", "differs", "sends_back", "loses_track", "storms", "reports")
    assert all(seen[f"hostile: {act}"] for act in said)
    assert seen["hostile: garbage"] and seen["hostile: wrong state"]


@pytest.mark.parametrize("seed", [3, 4])
def test_a_run_is_a_function_of_its_seed(seed: int) -> None:
    first, second = (Swarm(Scenario.drawn(seed)).run() for _ in range(2))
    assert first.clock.now == second.clock.now and first.counts == second.counts


def test_the_toy_model_tells_what_was_counted_twice_lost_or_late() -> None:
    """Any change of what was summed, or of the weights it was computed on, changes the state; its order does not."""
    run = ToyRun(1, 1, 3, 2, 0)
    states = []
    for order in ([0, 1, 2], [2, 0, 1], [0, 1], [0, 1, 1]):
        stage = ToyStage(run, 0, ToyState.first(run, 0))
        for microbatch in order:
            stage.gathered.clear()
            stage.forward(1, microbatch, None)
            stage.backward(1, microbatch, None)
        states.append(stage.state.after(run, 1, stage.sums))
    assert states[0] == states[1] and len(set(states)) == 3


def test_a_failure_names_its_seed_and_the_command_that_replays_it() -> None:
    broken = Swarm(Scenario.drawn(3))
    broken.clock.after(6.0, lambda: _break(broken))
    with pytest.raises(SimulationFailed, match="after step") as caught:
        broken.run()
    command = str(caught.value).split("replay: ")[1].removesuffix(" --trace").split()
    assert command == ["python", "scripts/simulate", "--seed", "3"]
    replayed = subprocess.run([sys.executable, *command[1:]], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert replayed.returncode == 0 and "seed=3" in replayed.stdout, replayed.stderr


def _break(swarm: Swarm) -> None:
    for peer in swarm.peers.values():
        assert peer.host is not None
        peer.host.model.state = replace(peer.host.model.state, moment=1)
