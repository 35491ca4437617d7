"""Disturb a swarm of two replicas a stage, and compare it with one that nobody disturbed."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Annotated

import typer

from peers.cli.common import run_script
from peers.cli.output import say
from protocol.errors import UserError
from swarm.cases import Case, matrix
from swarm.chaos import Outcome, disturb
from swarm.hostile import endure
from swarm.hostile_acts import HOSTILE_ACTS
from swarm.prepared import Prepared, prepare
from swarm.script import Act, format_script, parse_script, plan
from swarm.tables import hostile_line, matrix_line, say_outcome

EVERY_STEPS = 20  # steps between two disturbances of a seed
CASE_SECONDS = 900.0  # a run that hangs takes for ever; one on a busy machine must not fail

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

RunFile = Annotated[
    Path, typer.Argument(metavar="RUN.toml", help="The run's configuration, such as configs/chaos.toml.")
]
Seed = Annotated[int | None, typer.Option(help="What is done follows from it (default: a new one, which is printed).")]
Minutes = Annotated[float, typer.Option(min=0.1, help="A run that takes longer has failed.")]
Matrix = Annotated[bool, typer.Option("--matrix", help="One short run for each kind of disturbance.")]
Only = Annotated[str | None, typer.Option(help="Of the matrix, only the cases whose name has this in it.")]
Hostile = Annotated[
    str | None, typer.Option(metavar="NAME", help="Beside a hostile process that does this; `all`, or a part of names.")
]
Script = Annotated[str | None, typer.Option(help='Do this: "step 20; kill 0a; wait 5; start 0a".')]
Cache = Annotated[Path, typer.Option(help="Where the undisturbed runs and the swarm's folders are.")]
Fresh = Annotated[bool, typer.Option("--fresh", help="Make the undisturbed run again: the arithmetic has changed.")]


def main() -> None:
    """Run the command line; errors meant for a person become one line and an exit code."""
    run_script(app)


@app.command(help=__doc__)
def chaos(
    run: RunFile,
    seed: Seed = None,
    minutes: Minutes = 15.0,
    all_cases: Matrix = False,
    only: Only = None,
    script: Script = None,
    hostile: Hostile = None,
    cache: Cache = Path("runs/chaos"),
    fresh: Fresh = False,
) -> None:
    """See the module's text."""
    prepared = prepare(run, cache, fresh)
    if hostile is not None:
        raise typer.Exit(_run_hostile(prepared, cache, hostile))
    if all_cases or only is not None:
        raise typer.Exit(_run_matrix(prepared, cache, only or ""))
    if script is not None:
        acts = parse_script(script)
    else:
        seed = random.randrange(1 << 31) if seed is None else seed
        last_step = prepared.config.train.steps
        acts = plan(seed, prepared.replicas, prepared.first_step, last_step, EVERY_STEPS)
        say(f"seed {seed}: {format_script(acts)}")
    raise typer.Exit(_run_one(prepared, cache / "seed", acts, minutes))


def _run_one(prepared: Prepared, root: Path, acts: list[Act], minutes: float) -> int:
    outcome = disturb(prepared, root, acts, {}, prepared.config.train.steps, 60 * minutes)
    say_outcome(outcome)
    say(f"what everybody said is in {root / 'logs'}")
    return int(bool(outcome.wrong))


def _run_hostile(prepared: Prepared, cache: Path, name: str) -> int:
    names = [known for known in HOSTILE_ACTS if name == "all" or name in known]
    if not names:
        raise UserError(f"expected --hostile all, or a part of {', '.join(HOSTILE_ACTS)}; got {name!r}")
    usual = endure(prepared, cache / "hostile" / "nobody", None, None)
    say(hostile_line("nobody", usual, None))
    failed = int(bool(usual.wrong))
    for known in names:
        verdict = endure(prepared, cache / "hostile" / known, known, usual.pace)
        say(hostile_line(known, verdict, usual.pace))
        failed += bool(verdict.wrong)
    say(f"{len(names) + 1 - failed} of {len(names) + 1} runs are as they must be")
    return int(failed > 0)


def _run_matrix(prepared: Prepared, cache: Path, only: str) -> int:
    cases = [case for case in matrix(prepared.config.pipeline.stages) if only in case.name]
    if not cases:
        raise UserError(f"expected --only to fit the name of a case, got {only!r}")
    failed = 0
    for case in cases:
        outcome = run_case(prepared, cache / "matrix" / case.name.replace(" ", "-"), case)
        say(matrix_line(case.name, outcome))
        failed += bool(outcome.wrong)
    say(f"{len(cases) - failed} of {len(cases)} cases are as the undisturbed run")
    return int(failed > 0)


def run_case(prepared: Prepared, root: Path, case: Case, seconds: float = CASE_SECONDS) -> Outcome:
    """Run one case of the matrix in `root`.

    Raises:
        UserError: the run has too few steps for it.
    """
    every, first = prepared.config.checkpoint.every, prepared.first_step
    last_step = (first + case.last) // every * every
    if last_step > prepared.config.train.steps:
        raise UserError(
            f"expected a run of at least {last_step} steps, got train.steps = {prepared.config.train.steps}"
        )
    outcome = disturb(prepared, root, case.acts(first), case.faults_at(first), last_step, seconds)
    missed = [act for act in outcome.undone if not act.makes_good(prepared.replicas)]
    if missed:
        outcome.wrong.append(f"the run was done before it was disturbed: {format_script(missed)}")
    return outcome
