"""The matrix: a death at each point of a peer's work, at each place in the pipeline, and what else can happen.

Steps count from the beginning that all cases share: `{n}` in a script or fault is that many steps later.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from peers.faults import Phase
from swarm.script import Act, parse_script

STEP_PHASES = [phase for phase in Phase if phase not in (Phase.DONOR, Phase.NEWCOMER)]
# Steps after the beginning. A process takes as long to start as fifty steps, on two cores that are busy with them.
LAST, LAST_WITH_NEWCOMER = 60, 140


@dataclass(frozen=True, slots=True)
class Case:
    """One disturbance: `faults` of the first replicas, what is done from outside, and how many steps there are."""

    name: str
    script: str
    faults: Mapping[str, str] = field(default_factory=dict)
    last: int = LAST

    def acts(self, first_step: int) -> list[Act]:
        """The acts, if the first step is that."""
        return parse_script(_at(self.script, first_step))

    def faults_at(self, first_step: int) -> dict[str, str]:
        """The faults, if the first step is that."""
        return {name: _at(fault, first_step) for name, fault in self.faults.items()}


def _at(text: str, first_step: int) -> str:
    return re.sub(r"\{(\d+)\}", lambda found: str(first_step + int(found[1])), text)


def matrix(stages: int) -> list[Case]:
    """All cases, for a swarm of two replicas for each of so many stages."""
    places = sorted({0, stages // 2, stages - 1})
    deaths = [_death(phase, stage) for phase in STEP_PHASES for stage in places]
    return [*_others(places), *deaths]


def _death(phase: Phase, stage: int) -> Case:
    # The checkpoint is the one that is written ten steps later.
    step = 9 if phase is Phase.CHECKPOINT else 5
    peer = f"{stage}a"
    return Case(f"{phase} stage {stage}", f"gone {peer}; wait 3; start {peer}", {peer: f"{phase}@{{{step}}}"})


def _others(places: list[int]) -> list[Case]:
    first, middle, last = places[0], places[len(places) // 2], places[-1]
    scripts = {
        "stopped and suspected wrongly": f"step {{5}}; stop {middle}b; wait 7; continue {middle}b",
        "coordinator killed": "step {5}; kill coordinator; wait 5; start coordinator",
        "coordinator and a peer killed": (
            f"step {{5}}; kill coordinator; kill {last}a; wait 5; start coordinator; wait 5; start {last}a"
        ),
        "both replicas, one comes back": f"step {{15}}; kill {middle}a; kill {middle}b; wait 3; start {middle}a",
        "left by SIGINT": f"step {{5}}; interrupt {last}a",
    }
    reduction = Case(
        "stopped in the reduction",
        f"stopped {middle}a; wait 30; continue {middle}a",
        {f"{middle}a": "reduction@{5}:stop"},
    )
    # Who stands still holds the others up within two steps: later ones come when it is out, and not before.
    excluded = f"step {{5}}; stop {middle}b; step {{10}}; continue {middle}b"
    stopped = [reduction, Case("stopped and excluded wrongly", excluded, {}, LAST_WITH_NEWCOMER)]
    return [*stopped, *(Case(name, script) for name, script in scripts.items()), *_newcomers(first, middle, last)]


def _newcomers(first: int, middle: int, last: int) -> list[Case]:
    # A newcomer goes where it is needed most: whichever stage that is, one of its two donors dies.
    donors = {f"{stage}b": "donor@2" for stage in range(last + 1)}
    only = f"step {{3}}; kill {middle}a; wait 1; renew {middle}a; gone {middle}b; wait 2; start {middle}b"
    itself = f"step {{3}}; kill {middle}a; renew {middle}a newcomer@2; gone {middle}a; start {middle}a"
    both = f"step {{15}}; kill {first}a; kill {first}b; start new-1; start new-2"
    return [
        Case("one more joins", "step {3}; start new-1", {}, LAST_WITH_NEWCOMER),
        Case("newcomer killed", itself, {}, LAST_WITH_NEWCOMER),
        Case("one of two donors killed", "step {3}; start new-1", donors, LAST_WITH_NEWCOMER),
        Case("only donor killed", only, {f"{middle}b": "donor@2"}, LAST_WITH_NEWCOMER),
        Case("both replicas, two newcomers", both, {}, LAST_WITH_NEWCOMER),
    ]
