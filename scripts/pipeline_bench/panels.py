"""One step of each arm, a panel each, on one axis: what each stage computes, and what is under way meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline_bench.cases import ARMS
from protocol.errors import UserError

FAR_LONGER = 2.0  # times the shortest step: what lasts longer is cut there

FORWARD, BACKWARD, OTHER = "forward", "backward", "update, other"
COMPUTE = {FORWARD: "#2f6db5", BACKWARD: "#e07b1a", OTHER: "#55585c"}
UNDER_WAY = {FORWARD: "#8fb8e6", BACKWARD: "#f5bd78", OTHER: "#b8babd"}
BAND = "#f1f1ee"
CAPTION = (
    "A bar is a microbatch: strong, its stage computes; pale, its message is on the way to the stage before or after, "
    "or a trainer waits for its call.\n"
    "A gap in a stage's upper row: it waits. All stages share the cores of one machine."
)
KINDS = {"F": FORWARD, "B": BACKWARD}

Event = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Bar:
    """Something that lasted from second `start` of the step to `end`, in lane `lane` of its row."""

    kind: str
    start: float
    end: float
    lane: int = 0


@dataclass(slots=True)
class Row:
    """A row of a panel: what a stage computes, or what is under way between it and others."""

    label: str
    computes: bool
    bars: list[Bar] = field(default_factory=list)

    @property
    def lanes(self) -> int:
        """How many bars lie above each other at most."""
        return 1 + max((bar.lane for bar in self.bars), default=0)


@dataclass(frozen=True, slots=True)
class Panel:
    """An arm's step.

    Attributes:
        step_seconds: the whole step's, measured or, of a step that was not finished, reckoned.
        traced_seconds: how much of it is in the trace.
        whole: the trace holds all of it.
    """

    arm: str
    title: str
    link: str
    step_seconds: float
    traced_seconds: float
    whole: bool
    rows: Sequence[Row]

    def heading(self, shown: float) -> str:
        """The panel's title where the axis ends after `shown` seconds."""
        seconds = f"step {self.step_seconds:.3g} s" if self.whole else f"step about {self.step_seconds:.3g} s"
        part = min(shown, self.traced_seconds)
        cut = "" if self.whole and part >= self.traced_seconds else f" (only its first {part:.3g} s are shown)"
        return f"{self.title}: {seconds}{cut}"


def panel(trace: dict[str, Any], where: str) -> Panel:
    """The panel of a trace that `bench_pipeline run --trace` wrote; `where` is its file.

    Raises:
        UserError: it is another trace.
    """
    about = trace.get("otherData", {})
    if not {"arm", "title", "link", "step_seconds", "start", "end", "whole"} <= set(about):
        raise UserError(f"expected traces of scripts/bench_pipeline run --trace after --arms, {where} is none")
    seconds = (about["end"] - about["start"]) / 1e6
    return Panel(
        arm=about["arm"],
        title=about["title"],
        link=about["link"],
        step_seconds=seconds if about["whole"] else about["step_seconds"],
        traced_seconds=seconds,
        whole=about["whole"],
        rows=rows(trace["traceEvents"], about["start"], about["end"]),
    )


def rows(events: Sequence[Event], start: float, end: float) -> list[Row]:
    """Two rows for each stage: what it computes, and its messages to other stages or the trainer's calls of it.

    A message of ours lasts from when it was queued to when it was there, which only the receiver's trace knows.
    """
    tracks = by_track(events)
    stages = sorted({name for name, _ in tracks if name.startswith("stage ")}, key=lambda name: int(name.split()[1]))
    label = "calls to it" if any(name == "trainer" for name, _ in tracks) else "it sends"
    found: dict[tuple[str, bool], Row] = {}
    for stage in stages:
        found |= {(stage, True): Row(stage, True), (stage, False): Row(label, False)}
    for (process, track), mine in sorted(tracks.items()):
        word, _, other = track.partition(" ")
        place = (other.removeprefix("of ") if word == "calls" else process, word == "compute")
        known = word in ("compute", "calls") or (word == "to" and other in stages)  # not what the coordinator gets
        if known and place in found:
            came = [e for e in tracks.get((other, f"from {process}"), ()) if e["ph"] == "i"]
            _add(found[place], [(e["name"], e["ts"], _there(e, came)) for e in mine if e["ph"] == "X"], start, end)
    return list(found.values())


def by_track(events: Sequence[Event]) -> dict[tuple[str, str], list[Event]]:
    """What happened, by process (stage 0, trainer) and track (compute, to stage 1), however many rows a track has."""
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    stages = {name.partition(": peer ")[2]: name.split(":")[0] for name in names.values()}
    tracks = {(e["pid"], e["tid"]): e["args"]["name"].split(" (")[0] for e in events if e["name"] == "thread_name"}
    found: dict[tuple[str, str], list[Event]] = {}
    for event in events:
        if event["ph"] in "Xi":
            word, _, other = tracks[event["pid"], event["tid"]].partition(" ")
            track = f"{word} {stages.get(other, other)}" if other else word
            found.setdefault((names[event["pid"]].split(":")[0], track), []).append(event)
    return found


def _there(span: Event, came: Sequence[Event]) -> float:
    """When the message of `span` was there; where that is not known, when the sender was done with it."""
    left: float = span["ts"] + span["dur"]
    return min((e["ts"] for e in came if e["name"] == span["name"] and e["ts"] >= span["ts"]), default=left)


def _add(row: Row, spans: Sequence[tuple[str, float, float]], start: float, end: float) -> None:
    """Put them into as few lanes below those that the row has as hold them without an overlap."""
    first, free = row.lanes if row.bars else 0, list[float]()
    for name, left, right in sorted(spans, key=lambda span: span[1]):
        if right > start and left < end:
            lane = next((index for index, until in enumerate(free) if until <= left), len(free))
            free[lane : lane + 1] = [right]
            seconds = (max(left, start) - start) / 1e6, (min(right, end) - start) / 1e6
            row.bars.append(Bar(KINDS.get(name[0], OTHER), *seconds, first + lane))


def in_order(panels: Sequence[Panel]) -> list[Panel]:
    """In the order of the table."""
    order = [arm.name for arm in ARMS]
    return sorted(panels, key=lambda one: order.index(one.arm) if one.arm in order else len(order))


def axis_seconds(panels: Sequence[Panel]) -> float:
    """How long the common axis is: the longest step, or of those that are not far longer than the shortest one."""
    limit = FAR_LONGER * min(one.step_seconds for one in panels)
    longest = max(one.step_seconds for one in panels)
    return longest if longest <= limit else limit


def draw_panels(panels: Sequence[Panel], output: Path, seconds: float | None = None) -> None:
    """The picture. `seconds`: of the axis; None: `axis_seconds`."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    shown = seconds or axis_seconds(panels)
    heights = [0.55 + 0.15 * len(one.rows) for one in panels]
    figure, all_axes = plt.subplots(
        len(panels), 1, sharex=True, squeeze=False, figsize=(13, sum(heights) + 1.2), height_ratios=heights
    )
    for axes, one in zip(all_axes[:, 0], panels, strict=True):
        _draw(axes, one, shown)
    all_axes[-1, 0].set_xlabel("seconds since the step began at stage 0, or at the chain's trainer")
    links = ", ".join(dict.fromkeys(one.link for one in panels))
    heading = figure.suptitle(
        f"One training step of each arm ({links})", fontsize=12, y=1 - 0.12 / figure.get_figheight()
    )
    heading.set_in_layout(False)
    legend = [Patch(color=COMPUTE[kind], label=f"computes: {kind}") for kind in COMPUTE]
    legend += [Patch(color=UNDER_WAY[kind], label=f"under way: {kind}") for kind in (FORWARD, BACKWARD)]
    top = 1 - 0.35 / figure.get_figheight()
    figure.legend(handles=legend, loc="upper center", bbox_to_anchor=(0.5, top), ncols=5, fontsize=9, frameon=False)
    figure.text(0.5, 1 - 0.66 / figure.get_figheight(), CAPTION, fontsize=8, ha="center", va="top")
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.95 / figure.get_figheight()), h_pad=0.6)
    figure.savefig(output, dpi=130)
    plt.close(figure)


def _draw(axes: Any, one: Panel, shown: float) -> None:
    for index, row in enumerate(one.rows):
        if index % 4 < 2:
            axes.axhspan(index - 0.5, index + 0.5, color=BAND, zorder=0, linewidth=0)
        colours, height = (COMPUTE, 0.92) if row.computes else (UNDER_WAY, 0.8)
        for bar in row.bars:
            if bar.start < shown:
                top, thick = index - height / 2 + bar.lane * height / row.lanes, height / row.lanes
                axes.broken_barh(
                    [(bar.start, min(bar.end, shown) - bar.start)],
                    (top, thick),
                    facecolor=colours[bar.kind],
                    edgecolor="white",
                    linewidth=0.3 if thick > 0.3 else 0,
                )
    if one.whole and one.traced_seconds < shown:
        axes.axvline(one.traced_seconds, color="black", linewidth=0.8)
        axes.text(one.traced_seconds, len(one.rows) / 2 - 0.5, " end of the step", fontsize=7, va="center")
    axes.set_yticks(range(len(one.rows)), [row.label for row in one.rows], fontsize=7)
    axes.set_ylim(len(one.rows) - 0.5, -0.5)
    axes.set_xlim(0, shown)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=7, labelbottom=True)
    axes.set_title(one.heading(shown), fontsize=9, loc="left")
