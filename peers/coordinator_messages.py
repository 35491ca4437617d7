"""The control messages between a coordinator and its peers: what comes is bounded and becomes events. Pure.

peer -> coordinator   join, reports, leave, failed, goodbye, differs, accuse, lost_track, irreplaceable, rate
coordinator -> peer   admitted, view, seen, notice, released, turned_away, unknown, end
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from peers.step_costs import PeerFigures
from peers.step_reports import StepReport, WireTotals
from protocol.errors import BadFrame, IsthmusError, NotFinite, RemoteError, RunFailed
from protocol.membership_events import Accused, Differs, End, Event, Failed, Irreplaceable, LeaveAsked, LostTrack
from protocol.peer_report import (
    LARGEST_STEP,
    LONGEST_HASH,
    LONGEST_PEER,
    PeerReport,
    is_count,
    is_measure,
    is_text,
    parse_report,
)
from protocol.plain_text import plain
from protocol.view import View

MOST_REPORTS = 2_000
LONGEST_REPORTS = 1 << 18  # bytes of the longest message of a member: a hundred steps, and its checkpoints
MOST_HASHES = 256
LONGEST_REASON = 500


@dataclass(frozen=True, slots=True)
class Reported:
    """A `reports` message: the peer's own account, its steps, and what its daemon has sent and cost so far."""

    account: PeerReport
    steps: tuple[StepReport, ...]
    wire: WireTotals
    figures: PeerFigures = field(default_factory=PeerFigures)

    def counted(self, view: View | None) -> list[StepReport]:
        """The steps that are of the run as it is in `view`: an older epoch's count up to where the run went back to."""
        if view is None or self.account.epoch > view.epoch:
            return []
        if self.account.epoch == view.epoch:
            return list(self.steps)
        newest = view.restored if self.account.epoch == view.epoch - 1 else 0
        return [report for report in self.steps if report.step <= newest]


def parse_reports(message: Mapping[str, Any], stages: int) -> Reported:
    """The content of a `reports` message.

    Raises:
        BadFrame: a field is missing, of another type, or beyond its bound.
    """
    steps = message.get("reports")
    if not isinstance(steps, list) or len(steps) > MOST_REPORTS:
        raise BadFrame(f"expected at most {MOST_REPORTS} step reports in one message")
    account = parse_report(message, stages)
    wire = WireTotals.from_json(message.get("wire"))
    figures = PeerFigures.from_json(message.get("figures"))
    return Reported(account, tuple(map(StepReport.from_json, steps)), wire, figures)


def parse_goodbye(message: Mapping[str, Any]) -> tuple[WireTotals, PeerFigures]:
    """What a daemon has sent and cost, in its last word.

    Raises:
        BadFrame: the totals are missing, or something is not of its form.
    """
    return WireTotals.from_json(message.get("wire")), PeerFigures.from_json(message.get("figures"))


def parse_rate(message: Mapping[str, Any]) -> tuple[int, str]:
    """The step after which a link changed its bits, and what the peer says of it.

    Raises:
        BadFrame: there is no step.
    """
    step = message.get("step")
    if type(step) is not int or not is_count(step, LARGEST_STEP):
        raise BadFrame(f"expected the step after which a rate changed, got {str(step)[:40]}")
    return step, _reason(message)


def parse_event(peer: str, message: Mapping[str, Any]) -> Event | None:
    """What a member's message means for the membership; None: nothing, it is of a type that is unknown here.

    Raises:
        BadFrame: a field is missing, of another type, or beyond its bound.
    """
    match message["type"]:
        case "leave":
            return LeaveAsked(peer)
        case "failed":
            return _failed(peer, message)
        case "differs":
            return _differs(peer, message)
        case "accuse":
            accused = message.get("peer")
            if not isinstance(accused, str) or not is_text(accused, LONGEST_PEER):
                raise BadFrame("expected the peer that is accused")
            return Accused(peer, accused, _reason(message), message.get("state") is True)
        case "lost_track":
            view = message.get("view")
            if not is_count(view, LARGEST_STEP):
                raise BadFrame(f"expected the view by which it lost track, got {str(view)[:40]}")
            return LostTrack(peer, _reason(message), int(view or 0))
        case "irreplaceable":
            epoch, step = message.get("epoch"), message.get("step")
            if not is_count(epoch, LARGEST_STEP) or not is_count(step, LARGEST_STEP):
                raise BadFrame(f"expected an epoch and a step, got {str((epoch, step))[:40]}")
            return Irreplaceable(peer, int(epoch or 0), int(step or 0), _reason(message))
    return None


def _differs(peer: str, message: Mapping[str, Any]) -> Differs:
    step, hashes = message.get("step"), message.get("hashes")
    if type(step) is not int or not is_count(step, LARGEST_STEP):
        raise BadFrame(f"expected the step of which the weights differ, got {str(step)[:40]}")
    if not isinstance(hashes, dict) or len(hashes) > MOST_HASHES:
        raise BadFrame(f"expected the weights' hashes of at most {MOST_HASHES} replicas")
    # Whatever a replica put into its part, the others must be able to tell it: nobody applies the step before.
    if not all(is_text(replica, LONGEST_PEER) and is_text(digest, LONGEST_HASH) for replica, digest in hashes.items()):
        raise BadFrame("expected a hash of the weights for each replica")
    return Differs(peer, step, hashes)


def _reason(message: Mapping[str, Any]) -> str:
    """What a peer says, for people."""
    return plain(message.get("reason", "it gave no reason"), LONGEST_REASON)


def failed_message(error: Exception, epoch: int) -> dict[str, Any]:
    """This peer cannot go on. What arithmetic cannot go on with here, it cannot at the other replicas either.

    Args:
        epoch: of the newest view here.
    """
    reason = str(error) if isinstance(error, IsthmusError | RemoteError) else repr(error)
    message = {"type": "failed", "reason": reason, "fatal": isinstance(error, RunFailed)}
    return message | ({"epoch": epoch, "step": error.step} if isinstance(error, NotFinite) else {})


def _failed(peer: str, message: Mapping[str, Any]) -> Failed:
    epoch, step = message.get("epoch", 0), message.get("step", 0)
    if not is_count(epoch, LARGEST_STEP) or not is_count(step, LARGEST_STEP):
        raise BadFrame(f"expected the epoch and the step that failed, got {str((epoch, step))[:40]}")
    return Failed(peer, _reason(message), message.get("fatal") is True, epoch, step)


def view_message(record: bytes) -> dict[str, Any]:
    """A signed view."""
    return {"type": "view", "record": record.decode()}


def seen_message(step: int, epoch: int, budget: float | None = None) -> dict[str, Any]:
    """All rows up to `step` are in the file; reports of them need not come again.

    Args:
        budget: with adaptive rates, the seconds that a link may take in a step, where they are known.
    """
    return {"type": "seen", "step": step, "epoch": epoch, **({} if budget is None else {"budget": budget})}


def budget_in(message: Mapping[str, Any]) -> float | None:
    """The budget in a `seen`; None: there is none, or it is none."""
    value = message.get("budget")
    return float(value) if isinstance(value, int | float) and is_measure(value, 1e6) and value > 0 else None


def end_message(end: End) -> dict[str, Any]:
    """The run is over."""
    return {"type": "end", "step": end.step, "failed": end.failed, "reason": end.reason}
