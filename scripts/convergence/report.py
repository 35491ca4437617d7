"""docs/convergence.md, put together from a text that is written by hand and the figures of the results.

    {{table GROUP}} {{time GROUP}} {{sweep GROUP}} {{horizons GROUP}}   tables
    {{plot GROUP bytes}}, or time, rates, curves                        a picture
    {{value GROUP ARM loss}}, or one of VALUES                          a figure in a sentence
    {{meter}}                                                           the meter against the published step times

An unknown placeholder is an error, and so is none that is closed: a page with a hole must not be committed.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from convergence import tables
from convergence.plan import PlannedArm
from convergence.plots import PLOTS, draw
from convergence.public_case import LINKS
from convergence.results import Results
from convergence.summary import ArmSummary, GroupSummary, summarise
from peers.files import write_bytes
from protocol.errors import UserError

NOTICE = "<!-- Made by `python scripts/bench_convergence report` from {source}: change that, not this. -->\n\n"
TABLES: Mapping[str, Callable[[GroupSummary], str]] = {
    "table": tables.main_table,
    "time": tables.time_table,
    "sweep": tables.sweep_table,
    "horizons": tables.horizon_table,
}
VALUES: Mapping[str, Callable[[GroupSummary, ArmSummary], str]] = {
    "loss": lambda group, arm: f"{arm.loss:.3f}",
    "gap": lambda group, arm: tables.signed(group.gap(arm), 3),
    "spreads": lambda group, arm: tables.signed(group.gap_in_spreads(arm), 1),
    "rate": lambda group, arm: f"{arm.rate:g}",
    "bytes": lambda group, arm: f"{arm.wire.forward:.1f} + {arm.wire.backward:.1f}",
    "steps": lambda group, arm: str(arm.steps or "-"),
    "time200": lambda group, arm: tables.relative(group, arm, LINKS[0]),
    "time80": lambda group, arm: tables.relative(group, arm, LINKS[1]),
    "public200": lambda group, arm: tables.relative_to_reparam(group, arm, LINKS[0]),
    "public80": lambda group, arm: tables.relative_to_reparam(group, arm, LINKS[1]),
}
_PLACEHOLDER = re.compile(r"\{\{\s*(.*?)\s*\}\}")


class Page:
    """The figures that a text may ask for."""

    def __init__(self, plan: Mapping[str, list[PlannedArm]], results: Results, pictures: str) -> None:
        self._groups = {name: summarise(name, arms, results) for name, arms in plan.items()}
        self._pictures = pictures
        self.plots: dict[str, tuple[GroupSummary, str]] = {}

    def fill(self, text: str) -> str:
        """`text` with its placeholders replaced; `plots` then holds the pictures that it shows, by file name.

        Raises:
            UserError: a placeholder that is not known, or a "{{" that is not closed.
        """
        if text.count("{{") != len(_PLACEHOLDER.findall(text)):
            raise UserError('expected every "{{" of the text to be closed by "}}" in its line: correct it')
        return _PLACEHOLDER.sub(lambda match: self._replacement(match[1]), text)

    def _replacement(self, placeholder: str) -> str:
        kind, *words = placeholder.split()
        if kind == "meter" and not words:
            return tables.meter_table()
        if kind in TABLES and len(words) == 1:
            return TABLES[kind](self._group(words[0]))
        if kind == "plot" and len(words) == 2:
            return self._plot(self._group(words[0]), _known(PLOTS, words[1], "picture"))
        if kind == "value" and len(words) == 3:
            group = self._group(words[0])
            return VALUES[_known(VALUES, words[2], "value")](group, _arm(group, words[1]))
        raise UserError(
            f"expected {', '.join(TABLES)} GROUP, plot GROUP NAME, value GROUP ARM NAME or meter, "
            f"got {{{{{placeholder}}}}}: correct the text"
        )

    def _group(self, name: str) -> GroupSummary:
        return self._groups[_known(self._groups, name, "group")]

    def _plot(self, group: GroupSummary, name: str) -> str:
        if not group.arms:
            return f"(No rows of {group.name} yet.)"
        file = f"{group.name}-{name}.png"
        self.plots[file] = group, name
        return f"![{group.name}: {name}]({self._pictures}/{file})"


def write_report(plan: Mapping[str, list[PlannedArm]], results: Results, text: Path, page: Path) -> list[Path]:
    """Fill the text at `text` into `page`, with its pictures in the text's folder. What was written.

    Raises:
        UserError: the text is missing or has a placeholder that is not known; nothing was written.
    """
    try:
        source = text.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"expected the text of the report at {text}, cannot read it: {error.strerror}") from error
    pictures = text.parent.relative_to(page.parent).as_posix()
    content = Page(plan, results, pictures)
    filled = NOTICE.format(source=f"{pictures}/{text.name}") + content.fill(source)
    for file, (group, name) in content.plots.items():
        draw(group, name, text.parent / file)
    write_bytes(page, filled.encode())
    return [page, *(text.parent / file for file in content.plots)]


def _known(names: Mapping[str, object], name: str, what: str) -> str:
    if name in names:
        return name
    close = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {close[0]}?" if close else f"it is one of {', '.join(names)}"
    raise UserError(f"expected a {what} of the report, got {name}: {hint}")


def _arm(group: GroupSummary, name: str) -> ArmSummary:
    arms = {arm.arm.name: arm for arm in group.arms}
    return arms[_known(arms, name, f"trained arm of group {group.name}")]
