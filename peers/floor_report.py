"""The floor in a run's rows, in its report and for people. Pure."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from protocol.floor import Floor, Source

_PARTS = ("compute_seconds", "wire_seconds", "fill_seconds", "bound_seconds", "serialisation_seconds")


def floor_fields(floor: Floor | None, seconds: float) -> dict[str, Any]:
    """What a row says of the floor of a step that took `seconds`."""
    if floor is None:
        return {"floor": None, "step_over_floor": None}
    return {"floor": _to_json(floor), "step_over_floor": seconds / floor.seconds}


def floor_report(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The run's floor: each part is the median over its steps but the first, which warms links and caches up.

    Rows without a floor (a peer's report was lost; the row was written by an older version) are passed over.
    """
    known = [row for row in rows[1:] if row.get("floor") and "bound_seconds" in row["floor"]]
    if not known:
        return {"floor": None, "step_over_floor": None}
    floors = [row["floor"] for row in known]
    parts = {name: statistics.median(floor[name] for floor in floors) for name in _PARTS}
    names = {name: _usual(floor[name] for floor in floors) for name in ("busiest_link", "source", "delay_source")}
    floor = Floor(*parts.values())
    seconds = statistics.median(row["seconds"] for row in known)
    return {
        "step_over_floor": seconds / floor.seconds,
        "floor": {
            **parts,
            "seconds": floor.seconds,
            "step_over_bound": seconds / floor.bound_seconds,
            **names,
            "step_seconds": seconds,
            "steps": len(known),
        },
    }


def floor_line(report: Mapping[str, Any]) -> str:
    """The run's floor in a line for people."""
    floor = report.get("floor")
    if not floor:
        return "not known: fewer than two steps were reported by every stage"
    wire = f"wire {floor['wire_seconds']:.2f}" if floor["source"] != Source.UNKNOWN else "wire not known"
    fill = f"fill {floor['fill_seconds']:.2f}" + (
        " (without delays, which are not known)" if floor["delay_source"] == Source.UNKNOWN else ""
    )
    return (
        f"{floor['seconds']:.2f} s = max(compute {floor['compute_seconds']:.2f}, {wire}) + {fill}; "
        f"step / floor {report['step_over_floor']:.2f}"
    )


def _to_json(floor: Floor) -> dict[str, Any]:
    return {
        **{name: getattr(floor, name) for name in _PARTS},
        "seconds": floor.seconds,
        "busiest_link": floor.busiest_link,
        "source": floor.rates.value,
        "delay_source": floor.delays.value,
    }


def _usual(values: Iterable[str]) -> str:
    return Counter(values).most_common(1)[0][0]
