"""The results file: one JSON line per finished row, only ever appended to.

A row is found by the hash of its *whole* configuration, which holds learning rate, seed and steps. The hash is taken
of the stored configuration as today's code reads it: a new field of RunConfig then has its default, which is what the
row was trained with, and does not orphan every older row. A configuration that no longer reads is left alone.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from convergence.plan import Cell, PlannedArm
from convergence.sweep import Losses
from protocol import strict_json
from protocol.config import RunConfig, parse_config
from protocol.errors import ConfigError, UserError

Row = dict[str, Any]


@dataclass(slots=True)
class Results:
    """What the file holds.

    Attributes:
        rows: the newest row of each configuration, by its hash.
        unread: rows of configurations that this release cannot read.
    """

    rows: dict[str, Row] = field(default_factory=dict)
    unread: list[Row] = field(default_factory=list)
    _by_arm: dict[str, dict[Cell, Row]] = field(default_factory=dict)

    def add(self, row: Row) -> None:
        """Take `row` in, in place of an older one of the same configuration.

        Raises:
            ConfigError: this release cannot read its configuration.
        """
        config = config_of(row)
        cell = Cell(config.train.learning_rate, config.seed, config.train.steps)
        self.rows[config.hash()] = self._by_arm.setdefault(_without_cell(config), {})[cell] = row

    def of(self, arm: PlannedArm) -> Mapping[Cell, Row]:
        """The rows of `arm`."""
        return self._by_arm.get(_without_cell(arm.base_config()), {})

    def losses(self, arm: PlannedArm) -> Losses:
        """The final held-out loss of every row of `arm`, infinite where it diverged."""
        return {cell: loss_of(row) for cell, row in self.of(arm).items()}

    def find(self, prefix: str) -> Row:
        """The one row whose hash begins with `prefix`.

        Raises:
            UserError: none does, or several.
        """
        found = {id(row): row for key, row in self.rows.items() if prefix in (key[: len(prefix)], row["id"])}
        if len(found) != 1:
            some = ", ".join(f"{row['id']} ({row['arm']})" for row in list(found.values())[:8])
            raise UserError(f"expected the first digits of one row's id, got {prefix!r} of {some or 'none'}")
        return next(iter(found.values()))


def loss_of(row: Row) -> float:
    """The row's final held-out loss in nats, infinite if it diverged."""
    return math.inf if row["diverged"] else float(row["held_out_loss"])


def config_of(row: Row) -> RunConfig:
    """The row's configuration.

    Raises:
        ConfigError: this release cannot read it.
    """
    return parse_config(row["config"], f"row {row['id']}")


def load(path: Path) -> Results:
    """The rows at `path`; none when there is no such file.

    Raises:
        UserError: a line is damaged. A last line without its end is one that is just being written, and left out.
    """
    results = Results()
    whole, _, _ = path.read_bytes().rpartition(b"\n") if path.exists() else (b"", b"", b"")
    for number, line in enumerate(whole.splitlines(), start=1):
        try:
            row = strict_json.loads(line)
            results.add(row)
        except ConfigError:
            results.unread.append(row)
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path}, line {number}: expected a row, got {error}: remove the line") from error
    return results


def _without_cell(config: RunConfig) -> str:
    """What all rows of one arm share: the configuration without learning rate, seed and steps."""
    values = config.model_dump()
    del values["seed"], values["train"]["learning_rate"], values["train"]["steps"]
    return strict_json.canonical(values).decode()


def append(path: Path, row: Row) -> None:
    """Add `row` as one line, whole or not at all, also when several processes append."""
    line = json.dumps(row, allow_nan=False, separators=(",", ":")).encode() + b"\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        end = file.seek(0, os.SEEK_END)
        file.truncate(_whole_lines(path, end))
        file.write(line)
        file.flush()
        os.fsync(file.fileno())


def _whole_lines(path: Path, size: int) -> int:
    """The length of the file up to its last line end: what follows is of a writer that was killed."""
    return path.read_bytes().rfind(b"\n") + 1 if size else 0
