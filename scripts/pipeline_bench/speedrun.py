"""The meter of the public Protocol NanoGPT speedrun: T = steps to a target loss x steady step.

8 stages, 200 Mbit/s + 50 ms one way. Steps to the target are those of the convergence study: one process, which equals
the pipeline to the last bit. For the steady step there are two answers, and they are kept apart:

    lab      eight peers in the laboratory train the very model of the study
    public   the public model's width, tokens and compute by the public rule (`convergence.meter`), with the arm's
             d/k, bits and scales: what two cores cannot run
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from convergence.public_case import LINKS as PUBLIC_LINKS
from convergence.summary import ArmSummary, GroupSummary, StepTime, dense_step_time, step_time
from convergence.wire import as_metered

from pipeline_bench.measure import Row
from pipeline_bench.results import Results
from pipeline_bench.table import NOTHING, number, ratio
from protocol.config import RunConfig

GROUP = "main"  # of the plan: d = 128, 8 layers, the only one with several seeds and lengths
STAGES = 8
LINK = PUBLIC_LINKS[0]
LAB_LINK = "200"


@dataclass(frozen=True, slots=True)
class Entrant:
    """An arm of the convergence study that runs for time."""

    name: str
    arm: str
    title: str


ENTRANTS = (
    Entrant("dense", "dense", "dense bf16"),
    Entrant("reparam", "reparam-20-muon", "reparam, d/k = 6.4, bf16, Muon: the public form"),
    Entrant("default", "bottleneck-8-int4", "our default: k = d/16 in 4 bits"),
)


def lab_config(summary: ArmSummary, steps: int, microbatches: int) -> RunConfig:
    """The arm's run as eight peers train it: the same step, in `microbatches`, in the codec that it is metered with.

    Raises:
        ValueError: the step's sequences do not divide into so many.
    """
    config = as_metered(summary.config)
    sequences = config.train.microbatches * config.train.microbatch_size
    if sequences % microbatches:
        raise ValueError(f"expected microbatches that divide {sequences} sequences, got {microbatches}")
    values = config.model_dump()
    values["pipeline"] |= {"stages": STAGES, "window": 2 * STAGES}
    values["train"] |= {
        "microbatches": microbatches,
        "microbatch_size": sequences // microbatches,
        "steps": steps,
        "warmup_steps": min(config.train.warmup_steps, steps - 1),
    }
    return RunConfig.model_validate(values)


def find(group: GroupSummary, entrant: Entrant) -> ArmSummary | None:
    """The entrant's arm; None if nothing of it was trained."""
    return next((arm for arm in group.arms if arm.arm.name == entrant.arm), None)


@dataclass(frozen=True, slots=True)
class Time:
    """An entrant's steps, and its steady step, in seconds, in the public case and in the laboratory."""

    title: str
    steps: float | None
    described: str
    bytes_per_token: float
    public: StepTime
    lab: float | None

    @property
    def public_seconds(self) -> float | None:
        """T in the public case."""
        return None if self.steps is None else self.steps * self.public.seconds

    @property
    def lab_seconds(self) -> float | None:
        """T in the laboratory."""
        return None if self.steps is None or self.lab is None else self.steps * self.lab


def times(group: GroupSummary, results: Results) -> list[Time]:
    """Each entrant's time; those of whom nothing was trained are left out."""
    found = []
    for entrant in ENTRANTS:
        if (arm := find(group, entrant)) is not None:
            row, wire = results.find(entrant.name, LAB_LINK) or {}, arm.metered_wire
            dense = arm.arm.role == "dense"
            steps, described = _steps(group, arm)
            found.append(
                Time(
                    entrant.title,
                    steps,
                    described,
                    wire.forward + wire.backward,
                    dense_step_time(LINK) if dense else step_time(arm, LINK),
                    row.get("step_seconds"),
                )
            )
    return found


def _steps(group: GroupSummary, arm: ArmSummary) -> tuple[float | None, str]:
    """To the target, which is the loss of the best dense arm at its length: any dense arm is credited with that."""
    if arm.arm.role == "dense" and group.dense is not None:
        steps = group.dense.arm.horizons[0]
        return steps, f"{steps} (the target is the best dense arm's loss there)"
    return (None, NOTHING) if arm.steps is None else (arm.steps.mean, str(arm.steps))


def table(entries: Sequence[Time]) -> str:
    """T side by side, in Markdown."""
    head = (
        "arm", "steps to target", "B/token both ways, d = 128", "step, public case (microbatches)",
        "T, public case", "/ dense", "/ reparam", "step, lab", "T, lab", "/ dense", "/ reparam",
    )  # fmt: skip
    references = [next((e for e in entries if e.title == entrant.title), None) for entrant in ENTRANTS[:2]]
    lines = [head, tuple("---" for _ in head)]
    for entry in entries:
        public = [ratio(entry.public_seconds, r.public_seconds if r else None) for r in references]
        lab = [ratio(entry.lab_seconds, r.lab_seconds if r else None) for r in references]
        lines.append(
            (
                entry.title,
                entry.described,
                f"{entry.bytes_per_token:.1f}",
                f"{entry.public.seconds:.2f} s ({entry.public.microbatches})",
                _seconds(entry.public_seconds),
                *(number(value, ".3f") for value in public),
                NOTHING if entry.lab is None else f"{entry.lab:.2f} s",
                _seconds(entry.lab_seconds),
                *(number(value, ".3f") for value in lab),
            )
        )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _seconds(value: float | None) -> str:
    return NOTHING if value is None else f"{value:,.0f} s"


def failures(rows: Sequence[Row]) -> str:
    """What could not be measured, and why."""
    return "\n".join(f"- {row['arm']} in the lab: {row['error']}" for row in rows if "error" in row)
