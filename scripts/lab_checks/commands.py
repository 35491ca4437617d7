"""Laboratories for consumer links: each home in a network namespace, behind a line with a rate and a delay."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from lab_checks.check import Effort
from lab_checks.check import check as checked
from lab_checks.table import RATES, table
from peers.cli.common import run_script
from peers.cli.output import say
from peers.lab.lab_file import parse_place, read_lab
from peers.lab.laboratory import Laboratory, ask, change
from peers.lab.namespaces import check_possible, living
from peers.lab.namespaces import clean as clean_dead
from protocol.errors import UserError

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True, help=__doc__)

LabPath = Annotated[Path, typer.Argument(metavar="LAB.toml", help="The laboratory, such as labs/home-80.toml.")]
Homes = Annotated[int | None, typer.Option(min=2, help="How many homes (default: those in the file, at least 2).")]
Number = Annotated[int, typer.Argument(help="The laboratory's number, as `isthmus launch` and `list` say it.")]


def main() -> None:
    """Run the command line; errors meant for a person become one line and an exit code."""
    run_script(app)


@app.command()
def check(
    lab: LabPath, homes: Homes = None, seconds: Annotated[float, typer.Option(min=1, help="Of each rate.")] = 8.0
) -> None:
    """Measure plain TCP's rate, round trips and losses, and compare them with the file. Exit code 1: they differ."""
    file = read_lab(lab)
    right = True
    for line in checked(file, homes or max(2, len(file.homes)), Effort(seconds)):
        right = right and line.right
        say(f"{'ok   ' if line.right else 'WRONG'} {line.what:<28} {line.asked:<34} {line.measured}")
    raise typer.Exit(0 if right else 1)


@app.command()
def p2pd(
    out: Annotated[Path, typer.Option(help="The page.")] = Path("docs/lab_tables.md"),
    seconds: Annotated[float, typer.Option(min=1, help="Of each figure.")] = 6.0,
    rate: Annotated[list[float] | None, typer.Option(help="Mbit/s; may be given several times.")] = None,
) -> None:
    """Measure what p2pd's streams, and the transport over them, reach at several round trips; write a table."""
    table(out, rate or RATES, Effort(seconds), say)


@app.command("exec", context_settings={"ignore_unknown_options": True})
def execute(
    lab: LabPath,
    home: Annotated[str, typer.Argument(help="Where: a number from 0, or coordinator.")],
    command: Annotated[list[str], typer.Argument(help="The program and its arguments, after --.")],
    homes: Homes = None,
) -> None:
    """Run a program in one home of a new laboratory."""
    file, place = read_lab(lab), parse_place(home)
    count = max(homes or 2, len(file.homes))
    if isinstance(place, int) and place >= count:
        raise UserError(f"expected a home below {count}, got {place}: set --homes")
    with Laboratory(file, count) as opened:
        say(f"laboratory {opened.number}: " + ", ".join(f"{n} at {opened.address(n)}" for n in range(count)))
        raise typer.Exit(opened.run(place, command, check=False).returncode)


@app.command("set")
def set_line(
    number: Number,
    home: Annotated[str, typer.Argument(help="Whose line: a number from 0, coordinator, or all.")],
    up: Annotated[float | None, typer.Option(min=0, help="Mbit/s to the hub; 0: no limit.")] = None,
    down: Annotated[float | None, typer.Option(min=0, help="Mbit/s from the hub; 0: no limit.")] = None,
    delay: Annotated[float | None, typer.Option(min=0, help="Milliseconds to the hub, one way.")] = None,
    jitter: Annotated[float | None, typer.Option(min=0, help="Milliseconds more, at most.")] = None,
    loss: Annotated[float | None, typer.Option(min=0, help="The fraction of packets lost each way.")] = None,
) -> None:
    """Change a line of a laboratory that runs."""
    asked: dict[str, float | None] = {
        "up_mbit": up, "down_mbit": down, "delay_ms": delay, "jitter_ms": jitter, "loss": loss
    }  # fmt: skip
    line = {name: value for name, value in asked.items() if value is not None}
    if not line:
        raise UserError("expected what to change: --up, --down, --delay, --jitter or --loss")
    change(number, home if home == "all" else parse_place(home), line)


@app.command("list")
def list_running() -> None:
    """The laboratories that run, and what their lines have carried."""
    check_possible()
    for number in living():
        try:
            answer: dict[str, Any] = ask(number, {})
        except OSError:
            continue
        homes = [
            f"{place} {way['up']['bytes'] / 1e6:.1f} MB up {way['down']['bytes'] / 1e6:.1f} down"
            for place, way in answer["homes"].items()
        ]
        say(f"{number}: {', '.join(homes)}")


@app.command()
def clean() -> None:
    """Remove what killed laboratories left; those that run stay."""
    check_possible()
    cleaned = clean_dead()
    say(f"removed: {', '.join(map(str, cleaned))}" if cleaned else "nothing was left behind")
