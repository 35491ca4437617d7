"""The comparison as a table. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pipeline_bench.cases import ARMS, CHAINS, LINKS
from pipeline_bench.measure import Row

COLUMNS = (
    "arm", "on the wire", "tokens/s", "x chain", "x chain, in flight", "step, s", "step / floor",
    "B/token, all lines", "B/token, busiest line up / down", "CPU s/MB", "CPU s/1000 tokens",
)  # fmt: skip
NOTHING = "-"


def comparison(rows: Sequence[Row]) -> str:
    """A table for each link that has rows, in Markdown."""
    return "\n\n".join(_of_links(rows)) or "Not measured yet."


def _of_links(rows: Sequence[Row]) -> Iterator[str]:
    for link in LINKS:
        here = {row["arm"]: row for row in rows if row["link"] == link.name}
        if here:
            yield f"**{str(link)[0].upper()}{str(link)[1:]}**\n\n{_table(here)}{_reasons(here)}"


def _table(here: dict[str, Row]) -> str:
    lines = [COLUMNS, tuple("---" for _ in COLUMNS)]
    chains = [rate(here.get(chain)) for chain in CHAINS]
    for arm in ARMS:
        if arm.name in here:
            lines += _lines(arm.title, here[arm.name], chains)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _lines(title: str, row: Row, chains: Sequence[float | None]) -> Iterator[tuple[str, ...]]:
    if "error" in row:
        yield (title, "failed: see below", *[NOTHING] * (len(COLUMNS) - 2))
        return
    speed, floor = row["tokens_per_second"], floor_seconds(row)
    yield (
        title,
        _wire(row),
        f"{speed:,.0f}",
        *(number(ratio(speed, chain), ".2f") for chain in chains),
        f"{row['step_seconds']:,.2f}",
        number(row.get("step_over_floor"), ".2f"),
        f"{row['sent_bytes_per_token']:,.0f}",
        f"{row['busiest_sent_bytes_per_token']:,.0f} / {row['busiest_received_bytes_per_token']:,.0f}",
        number(row["cpu_seconds_per_megabyte"], ".3f"),
        f"{row['cpu_seconds_per_1000_tokens']:.3f}",
    )
    if floor is not None:
        speed = row["tokens"] / row["seconds"] * row["step_seconds"] / floor
        yield (
            f"its floor: {_parts(row['floor'])}",
            NOTHING,
            f"{speed:,.0f}",
            *(number(ratio(speed, chain), ".2f") for chain in chains),
            f"{floor:,.2f}",
            "1",
            *[NOTHING] * 4,
        )


def _wire(row: Row) -> str:
    """What crosses a boundary; of ours also the bytes per token, both ways, as declared and with frame headers."""
    if row.get("declared_bytes_per_token") is None:
        return str(row["wire"])
    return f"{row['wire']}: {row['declared_bytes_per_token']:.2f} B/token, framed {row['frame_bytes_per_token']:.2f}"


def _parts(floor: dict[str, Any]) -> str:
    return ", ".join(
        f"{name} {floor[f'{name}_seconds']:.2f} s"
        for name in ("compute", "wire", "fill")
        if floor.get(f"{name}_seconds") is not None
    )


def floor_seconds(row: Row) -> float | None:
    """The floor of the row's step in seconds; None where the run reports none."""
    floor = row.get("floor")
    return None if not floor else float(floor["seconds"])


def rate(row: Row | None) -> float | None:
    """Tokens per second; None for no row, or that of a failure."""
    return None if row is None else row.get("tokens_per_second")


def ratio(a: float | None, b: float | None) -> float | None:
    """a / b, where both are known."""
    return a / b if a is not None and b else None


def number(value: float | None, form: str) -> str:
    """`value` as text."""
    return NOTHING if value is None else format(value, form)


def _reasons(here: dict[str, Row]) -> str:
    reasons = [f"- {arm.title}: {here[arm.name]['error']}" for arm in ARMS if "error" in here.get(arm.name, {})]
    return "\n\nFailed:\n\n" + "\n".join(reasons) if reasons else ""
