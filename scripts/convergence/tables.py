"""The tables of docs/convergence.md, in Markdown. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence

from convergence.meter import Link
from convergence.public_case import CASE, FIXED_MICROBATCHES, LINKS, RUNS
from convergence.summary import ArmSummary, GroupSummary, step_time
from convergence.sweep import sweep_cell, sweep_rates
from convergence.target import spread_of
from convergence.wire import codec_label, is_metered_otherwise


def main_table(group: GroupSummary) -> str:
    """Each arm: what crosses, what it weighs, its loss, and the steps to the target."""
    head = (
        "arm", "k", "codec", "B/token forward + backward", "vs dense bf16", "parameters", "state",
        "lr", "loss",
        "gap, nats", "gap, spreads", "steps to target",
    )  # fmt: skip
    return _table(head, [_main_row(group, arm) for arm in group.arms] + _waiting(group, len(head)))


def time_table(group: GroupSummary) -> str:
    """Each arm's T on the meter, relative to dense bf16 and to the arm of role reparam."""
    head = ["arm", "B/token at d = 1024"]
    for link in LINKS:
        head += [f"step, {link} (M)", "T / dense", "T / reparam", "T / dense, M = 32"]
    return _table(head, [_time_row(group, arm) for arm in group.arms])


def sweep_table(group: GroupSummary) -> str:
    """The learning-rate sweep of each arm: the final loss at each rate, first seed and horizon."""
    rates = sorted({rate for arm in group.arms for rate in sweep_rates(arm.arm, arm.losses)})
    return _table(["arm", *(f"{rate:g}" for rate in rates)], [_sweep_row(arm, rates) for arm in group.arms])


def horizon_table(group: GroupSummary) -> str:
    """Final losses at the best rate for each length of run."""
    lengths = sorted({steps for arm in group.arms for steps in arm.arm.horizons})
    rows = [[arm.arm.name, *(_mean(list(arm.finals(steps).values())) for steps in lengths)] for arm in group.arms]
    return _table(["arm", *(f"{steps:,} steps" for steps in lengths)], rows)


def meter_table() -> str:
    """How the meter reproduces the published step times."""
    rows = [
        [
            run.name, f"{run.bytes_per_token:g}", str(run.microbatches), f"{run.step_seconds:g} s",
            f"{run.metered():.3f} s", f"{run.metered() / run.step_seconds - 1:+.2%}",
        ]
        for run in RUNS
    ]  # fmt: skip
    text = f"Compute: {CASE.compute_seconds:g} s a stage and step, the one number that was fitted."
    return text + "\n\n" + _table(["run", "B/token each way", "M", "published", "meter", "residual"], rows)


def _main_row(group: GroupSummary, arm: ArmSummary) -> list[str]:
    wire, config = arm.wire, arm.config
    dense_bytes = 4 * config.model.dim
    sent = arm.metered_wire.forward + arm.metered_wire.backward
    return [
        arm.arm.name,
        str(config.boundary_width),
        codec_label(config),
        f"{wire.forward:.2f} + {wire.backward:.2f}",
        f"{dense_bytes / sent:.1f} x{_dagger(arm)}",
        _millions(arm.row["parameters"]["total"]),
        f"{arm.row['state_bytes'] / 1e6:.1f} MB",
        f"{arm.rate:g}{_marks(arm)}",
        _mean(arm.base_losses),
        signed(group.gap(arm), 3),
        signed(group.gap_in_spreads(arm), 1),
        "target" if group.dense is not None and arm.arm.name == group.dense.arm.name else str(arm.steps or "-"),
    ]


def _marks(arm: ArmSummary) -> str:
    """An unfinished sweep, or a best rate that is the last one tried."""
    return " (sweep not finished)" if not arm.settled else " (at the edge)" if arm.at_edge else ""


def _time_row(group: GroupSummary, arm: ArmSummary) -> list[str]:
    wire = arm.wire_in(CASE, FIXED_MICROBATCHES)
    cells = [arm.arm.name, f"{wire.forward:.1f} + {wire.backward:.1f}{_dagger(arm)}"]
    for link in LINKS:
        time = step_time(arm, link)
        cells += [
            f"{time.seconds:.2f} s ({time.microbatches})",
            relative(group, arm, link),
            relative_to_reparam(group, arm, link),
            relative(group, arm, link, fixed=True),
        ]
    return cells


def _dagger(arm: ArmSummary) -> str:
    """What was trained in another codec than it is metered with."""
    return "†" if is_metered_otherwise(arm.config) else ""


def relative(group: GroupSummary, arm: ArmSummary, link: Link, fixed: bool = False) -> str:
    """T relative to the dense model in bfloat16."""
    return _ratio(group.time(arm, link, fixed), group.time_above(arm, link, fixed), group.dense_time(link, fixed))


def relative_to_reparam(group: GroupSummary, arm: ArmSummary, link: Link) -> str:
    """T relative to that of the arm of role reparam; below the ratio to its longest run if it missed the target."""
    reparam, time = group.reparam, group.time(arm, link)
    if reparam is None or arm is reparam:
        return "-" if reparam is None else "1"
    reached, longest = group.time(reparam, link), group.time_above(reparam, link)
    if reached is None and longest is not None:
        return "-" if time is None else f"< {time / longest:.3f}"
    return _ratio(time, group.time_above(arm, link), reached)


def _ratio(time: float | None, above: float | None, reference: float | None) -> str:
    if reference is None:
        return "-"
    if time is not None:
        return f"{time / reference:.3f}"
    return "-" if above is None else f"> {above / reference:.3f}"


def _sweep_row(arm: ArmSummary, rates: Sequence[float]) -> list[str]:
    losses = arm.losses
    cells = [arm.arm.name]
    for rate in rates:
        loss = losses.get(sweep_cell(arm.arm, rate))
        text = "" if loss is None else f"{loss:.4f}" if math.isfinite(loss) else "diverged"
        cells.append(f"**{text}**" if rate == arm.rate else text)
    return cells


def _waiting(group: GroupSummary, width: int) -> list[list[str]]:
    return [[arm.name, *["-"] * (width - 2), "diverged" if tried else "no rows yet"] for arm, tried in group.waiting]


def _mean(losses: Sequence[float]) -> str:
    """The mean and the spread over seeds."""
    finite = [loss for loss in losses if math.isfinite(loss)]
    if not losses or len(finite) < len(losses):
        return f"{len(losses) - len(finite)} of {len(losses)} diverged" if losses else ""
    spread = spread_of(finite)
    return f"{statistics.mean(finite):.4f}" + ("" if spread is None else f" ± {spread:.4f} ({len(finite)})")


def signed(value: float | None, digits: int) -> str:
    """With its sign; a dash for None."""
    return "-" if value is None else f"{value:+.{digits}f}"


def _millions(count: int) -> str:
    return f"{count / 1e6:.2f} M"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(_lines(head, rows))


def _lines(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield "|" + "---|" * len(head)
    yield from (f"| {' | '.join(row)} |" for row in rows)
