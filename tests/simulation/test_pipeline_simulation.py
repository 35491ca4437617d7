"""Pipelines in simulation: every seed must end with the weights of a plain loop, each microbatch computed once.

The simulator checks the rules at every event (see there); here are the seeds, and a look at the sum of what happened,
lest the network was too kind to test anything. It is exact: stages average over replicas in the simulator itself.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
simulator = importlib.import_module("simulator")

Scenario, Simulation = simulator.Scenario, simulator.Simulation
SEEDS = 200


def run_all(**kind: object) -> Counter[str]:
    """The sum of what happened in `SEEDS` runs. A failure's message has the seed and the command."""
    total: Counter[str] = Counter()
    for seed in range(SEEDS):
        total += Simulation(Scenario.drawn(seed, **kind)).run().counts
    assert total["runs"] == SEEDS
    return total


def test_every_seed_ends_with_the_weights_of_a_plain_loop() -> None:
    seen = run_all()
    assert seen["lost"] > SEEDS and seen["stalls"] > SEEDS and seen["mended"] > 50
    assert seen["of a newer view"] > 20 and seen["refused: old view"] > 20
    assert seen["moves"] > SEEDS


def test_a_stop_in_the_middle_ends_all_stages_at_the_same_step() -> None:
    seen = run_all(stop=True)
    assert seen["stops"] > SEEDS * 0.9
    assert seen["of a newer view"] > SEEDS and seen["refused: old view"] > 50 and seen["lost"] > SEEDS


@pytest.mark.parametrize("stop", [False, True])
def test_replicas_that_average_end_with_the_weights_of_a_plain_loop(stop: bool) -> None:
    assert run_all(most_replicas=2, stop=stop)["moves"] > SEEDS


def test_replicas_that_go_their_own_ways_do_not_block_each_other() -> None:
    """Without losses: what a stage forgets after two steps it may only forget because its replicas average."""
    seen = run_all(most_replicas=2, barrier=False)
    assert seen["refused: early"] > 0, "some replica ran more than a step ahead"


def test_without_losses_nothing_is_sent_again_to_get_through() -> None:
    """The stall timer is for losses; a run must not need it to go on. Here it never rings."""
    for seed in range(100):
        calm = replace(Scenario.drawn(seed), loss=0.0, outages=0, renumber=0, slowest_link=0.01, slowest_compute=0.02)
        assert Simulation(calm).run().counts["stalls"] == 0, calm


@pytest.mark.parametrize("seed", [3, 4])
def test_a_run_is_a_function_of_its_seed(seed: int) -> None:
    first, second = (Simulation(Scenario.drawn(seed, stop=True)).run() for _ in range(2))
    assert first.now == second.now and first.counts == second.counts


def test_a_scenario_without_order_would_be_noticed() -> None:
    """The toy model tells any change of what was summed, or of its order: else the tests above would prove little."""
    stage = [simulator.ToyStage(3, False) for _ in range(4)]
    for model, order in zip(stage, ([0, 1, 2], [1, 0, 2], [0, 1], [0, 1, 1, 2]), strict=True):
        for number, microbatch in enumerate(order):
            model.forward(number, microbatch, 10 + microbatch)
            model.backward(number, microbatch, 20 + microbatch)
    assert len({model.sum for model in stage}) == 4


def test_a_basis_that_one_stage_takes_a_step_late_would_be_noticed() -> None:
    scenario = replace(Scenario.drawn(5), move_every=2, steps=5, applied=0, replicas=(1, 1, 1))
    Simulation(scenario).run()
    broken = Simulation(scenario)
    model = broken.peers["s1r0"].model
    end_step, held = model.end_step, []

    def late(weight: int, basis: int | None) -> None:
        held.append(basis)
        end_step(weight, held[-2] if len(held) > 1 else None)

    model.end_step = late
    with pytest.raises(simulator.SimulationFailed, match="another weight"):
        broken.run()


def test_a_failure_names_its_seed_and_the_command_that_replays_it() -> None:
    scenario = Scenario.drawn(5, most_replicas=2, stop=True)
    broken = Simulation(scenario)
    next(iter(broken.peers.values())).model.weight += 1
    with pytest.raises(simulator.SimulationFailed, match=r"another weight|differ before") as caught:
        broken.run()
    command = str(caught.value).split("replay: ")[1].removesuffix(" --trace").split()
    assert command[:4] == ["python", "tests/simulation/simulator.py", "--seed", "5"]
    root = Path(__file__).parents[2]
    replayed = subprocess.run([sys.executable, *command[1:]], cwd=root, capture_output=True, text=True, timeout=60)
    assert replayed.returncode == 0 and str(scenario) in replayed.stdout, replayed.stderr
