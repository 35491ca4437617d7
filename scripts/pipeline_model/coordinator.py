"""What the coordinator hears and says in a step: messages as the daemons write them, of plausible content."""

from __future__ import annotations

from peers.step_reports import StepReport, WireTotals
from protocol.frame import HEADER_BYTES, control
from protocol.peer_report import PeerReport

HEARTBEAT_SECONDS = 2.0
HASH = "0123456789abcdef" * 2


def step_bytes(peers: int, step_seconds: float) -> float:
    """Both ways, for all peers: a report of each step, one more every two seconds, and the answer to each."""
    beats = step_seconds / HEARTBEAT_SECONDS
    return peers * (_report_bytes(1) + beats * _report_bytes(0) + (1 + beats) * _answer_bytes())


def _report_bytes(rows: int) -> int:
    wire = WireTotals(*[123_456_789_012] * len(WireTotals.__slots__))
    row = StepReport(
        step=1234,
        stage=12,
        loss=3.1415926535,
        gradient_norm=0.123456789,
        learning_rate=0.00123456789,
        seconds=12.3456789,
        compute_seconds=11.2345678,
        wire=wire,
        microbatches=32,
        weights=HASH,
    )
    account = PeerReport(12, 1, 12, 1234, HASH, {12: [1200, 1250], 13: [1250]}, True, 98765, (), 0.123456789, HASH[:16])
    message = {"type": "reports", "reports": [row.to_json()] * rows, "wire": wire.as_tuple(), **account.to_json()}
    return HEADER_BYTES + len(control(message).payload)


def _answer_bytes() -> int:
    return HEADER_BYTES + len(control({"type": "seen", "epoch": 1, "step": 1234}).payload)
