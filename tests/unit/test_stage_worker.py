"""What a worker tells the coordinator of itself."""

from __future__ import annotations

from unittest.mock import MagicMock

from peers.stage_compute import StepNumbers
from peers.stage_worker import StageWorker
from protocol.view import Replica


def test_the_weights_of_a_step_are_told_with_that_step_only() -> None:
    """While the checkpoint of step 4 is written, 3 are applied: a learner that named the wrong hash would start anew."""
    parts = MagicMock()
    parts.transport.peer_id = "a"
    worker = StageWorker(parts, 0, Replica("a", start=3), 0, False, MagicMock())
    worker._stage = MagicMock(numbers=StepNumbers(weights="ab", step=4))
    assert (worker.state()["applied"], worker.state()["weights"]) == (3, "")
    worker._stage.numbers = StepNumbers(weights="cd", step=3)
    assert worker.state()["weights"] == "cd"
