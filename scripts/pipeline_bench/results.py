"""The results file: one JSON object, a row for each arm on each link. A failed arm is a row, too, with its reason."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from peers.files import write_json
from pipeline_bench.measure import Row
from protocol.errors import UserError


class Results:
    """What the file at `path` holds."""

    def __init__(self, path: Path) -> None:
        self.path, self.rows = path, _read(path)

    def find(self, arm: str, link: str) -> Row | None:
        """The row of `arm` on `link`."""
        return next((row for row in self.rows if (row["arm"], row["link"]) == (arm, link)), None)

    def is_done(self, arm: str, link: str, key: str) -> bool:
        """Whether it was measured, with the configuration and the options that `key` stands for."""
        row = self.find(arm, link)
        return row is not None and "error" not in row and row.get("key") == key

    def put(self, row: Row) -> None:
        """Take `row` in, in place of an older one, and write the file."""
        others = [old for old in self.rows if (old["arm"], old["link"]) != (row["arm"], row["link"])]
        self.rows = [*others, row]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_json(self.path, {"rows": self.rows})


def _read(path: Path) -> list[Row]:
    if not path.exists():
        return []
    try:
        rows: Sequence[dict[str, Any]] = json.loads(path.read_text())["rows"]
        return [row for row in rows if row["arm"] and row["link"]]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"expected results of this script in {path}, it is damaged ({error}): remove it") from error
