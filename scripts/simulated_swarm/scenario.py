"""What is drawn for one simulated run: a function of its seed."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

from simulated_swarm.toy_model import ToyRun

PHASES = (
    "before a forward",
    "after a forward",
    "after a backward",
    "during PART",
    "during APPLY",
    "between APPLY and the offers",
    "during STATE",
    "during LOAD",
    "as a donor of chunks",
    "as a newcomer that fetches",
    "during a checkpoint",
    "while it follows",
)
KINDS = ("kill", "kill", "kill", "freeze", "isolate", "kill a stage", "cut a link")


@dataclass(frozen=True)
class PlannedFault:
    """What is to happen, once, to the first peer that comes to `phase` after `step` steps; or to any peer by time.

    Attributes:
        kind: one of `KINDS`, "flip", "leave", "kill the coordinator" or "kill all".
        phase: one of `PHASES`; "": at the time when somebody applies `step`, to a peer that is drawn.
        seconds: how long it lasts; a killed peer is started again after them. 0: it never is.
    """

    kind: str
    step: int
    phase: str = ""
    seconds: float = 0.0

    def __str__(self) -> str:
        where = f" {self.phase}" if self.phase else ""
        return f"{self.kind}{where} from step {self.step} on, {self.seconds:.0f} s"


@dataclass(frozen=True)
class Scenario:
    """One simulated run.

    Attributes:
        replicas: how many peers join for each stage at the start.
        loss, duplicate, corrupt: chances for each message, the last for chunks.
        slowest_link: seconds; `bandwidth`: bytes a second; `ordered`: messages of a link do not overtake each other.
        slow_peers: chance that a peer computes ten times as long.
        checkpoint_every: steps; `copies`: at how many other peers; `keep`: of how many a disk keeps those.
        joins: seconds after the start at which further peers come.
        bad: a peer sends garbage now and then.
        hostile: one more peer joins that lies; not beside a peer that is broken: of two liars each is a witness.
        gpipe: all forwards of a step before its first backward; measured: of the credits, what was measured counts.
    """

    seed: int
    run: ToyRun
    replicas: tuple[int, ...]
    window: int
    steps: int
    chunk_bytes: int
    loss: float
    duplicate: float
    corrupt: float
    slowest_link: float
    bandwidth: float
    ordered: bool
    slowest_compute: float
    slow_peers: float
    checkpoint_every: int
    copies: int
    keep: int
    joins: tuple[float, ...] = ()
    faults: tuple[PlannedFault, ...] = field(default=())
    bad: bool = False
    gpipe: bool = False
    measured: bool = True
    hostile: bool = False

    @classmethod
    def drawn(cls, seed: int) -> Scenario:
        """The scenario of `seed`."""
        rng = random.Random(f"scenario {seed}")
        stages = rng.choice([1, 2, 2, 3, 3, 4])
        run = ToyRun(seed, stages, rng.randint(1, 6), rng.choice([0, 2, 5]), rng.choice([0, 0, 2, 3]))
        replicas = tuple(rng.choice([1, 2, 2, 3]) for _ in range(stages))
        steps = rng.randint(8, 24)
        calm = rng.random() < 0.3
        drawn = cls(
            seed=seed,
            run=run,
            replicas=replicas,
            window=rng.randint(1, 5),
            steps=steps,
            chunk_bytes=rng.choice([3, 7, 16, 1 << 18]),
            loss=0.0 if calm else rng.choice([0.002, 0.01, 0.04]),
            duplicate=0.0 if calm else rng.choice([0.0, 0.1, 0.3]),
            corrupt=rng.choice([0.0, 0.0, 0.02]),
            slowest_link=rng.choice([0.01, 0.05, 0.5]),
            bandwidth=rng.choice([1e4, 1e5, 1e6]),
            ordered=rng.random() < 0.3,
            slowest_compute=rng.choice([0.02, 0.1, 0.3]),
            slow_peers=rng.choice([0.0, 0.0, 0.2]),
            checkpoint_every=rng.choice([2, 3, 5]),
            copies=rng.choice([1, 1, 2]),
            keep=rng.choice([2, 3, 5]),
            joins=tuple(sorted(rng.uniform(1, 60) for _ in range(rng.choice([0, 0, 1, 2])))),
            faults=_faults(rng, steps, replicas),
            bad=rng.random() < 0.05,
            gpipe=rng.random() < 0.2,
            measured=rng.random() < 0.5,
        )
        alone = not drawn.bad and all(fault.kind != "flip" for fault in drawn.faults)
        hostile = rng.random() < 0.25 and alone  # drawn late: all else is as it was
        return replace(
            drawn, hostile=hostile, run=replace(run, not_finite=() if hostile else _not_finite(rng, stages, steps))
        )

    @property
    def command(self) -> str:
        """What replays it."""
        return f"python scripts/simulate --seed {self.seed} --trace"


def _not_finite(rng: random.Random, stages: int, steps: int) -> tuple[tuple[int, int], ...]:
    """(step, stage): now and then one step, or some in a row."""
    if rng.random() < 0.8:
        return ()
    first = rng.randint(1, steps)
    return tuple((step, rng.randrange(stages)) for step in range(first, min(steps, first + rng.randrange(4)) + 1))


def _faults(rng: random.Random, steps: int, replicas: tuple[int, ...]) -> tuple[PlannedFault, ...]:
    if max(replicas) > 2 and rng.random() < 0.15:
        return (
            PlannedFault("flip", rng.randint(1, max(1, steps // 2)), "during PART"),
        )  # before it, others are misled
    faults = [_fault(rng, steps) for _ in range(rng.choice([0, 1, 1, 2, 2, 3, 5]))]
    if rng.random() < 0.25:
        faults.append(PlannedFault("kill the coordinator", rng.randint(0, steps - 1), seconds=rng.uniform(1, 40)))
    if rng.random() < 0.1:
        faults.append(PlannedFault("leave", rng.randint(1, steps - 1)))
    if rng.random() < 0.05:
        faults.append(PlannedFault("kill all", rng.randint(1, steps - 1), seconds=rng.uniform(5, 40)))
    return tuple(faults)


def _fault(rng: random.Random, steps: int) -> PlannedFault:
    kind = rng.choice(KINDS)
    phase = rng.choice(("", *PHASES)) if kind in ("kill", "freeze", "isolate") else ""
    forever = kind == "kill" and rng.random() < 0.3
    return PlannedFault(kind, rng.randint(0, steps - 1), phase, 0.0 if forever else rng.choice([0.5, 5, 15, 40, 100]))
