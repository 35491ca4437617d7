"""A row of the results trained again from its stored configuration, beside what it was."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from convergence.results import Row, config_of
from convergence.training import be_modest, train_row
from peers.cli.output import say

COMPARED = ("held_out_loss", "held_out_error", "held_out_curve", "train_curve", "diverged", "wire", "parameters")
SHOWN = ("torch", "commit", "seconds", "state_bytes", "data")


def rerun(row: Row, commit: str) -> bool:
    """Train `row` again and print old and new figures; whether all that is compared is equal to the last bit.

    Raises:
        ConfigError: this release cannot read its configuration.
    """
    be_modest()
    config = config_of(row)
    say(f"row {row['id']}: {row['group']}/{row['arm']}, {row['steps']} steps, took {row['seconds']:.0f} s")
    new = train_row(config) | {"commit": commit}
    for line in compare(row, new):
        say(line)
    equal = all(row[key] == new[key] for key in COMPARED)
    say("equal to the last bit" if equal else "NOT equal: another machine, torch, Python or commit can be the reason")
    return equal


def compare(old: Row, new: dict[str, Any]) -> Iterator[str]:
    """A line for each figure, with a "!" where a compared one differs."""
    for key in (*COMPARED, *SHOWN):
        mark = "!" if key in COMPARED and old[key] != new[key] else " "
        yield f"{mark} {key:16} {_short(old[key]):>44}  {_short(new[key]):>44}"


def _short(value: Any) -> str:
    if isinstance(value, list):  # a curve
        return f"{len(value)} points, last {value[-1][1]}" if value else "no points"
    return repr(value) if len(repr(value)) <= 44 else repr(value)[:41] + "..."
