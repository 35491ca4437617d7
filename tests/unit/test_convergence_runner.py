"""The runner: what is trained is kept, whatever happens to the rows beside it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any

import pytest
from convergence import results, runner, training
from convergence.plan import PlannedArm, parse_plan

from protocol.config import RunConfig
from protocol.errors import RunFailed, UserError

GROUP = {"seeds": [0], "learning_rates": [1e-3, 2e-3, 4e-3], "horizons": [30], "extensions": 0}
VALUES = {"diverged": "loss is not finite", "held_out_loss": None, "seconds": 1.0}


class Pool:
    """Trains at once, in this thread."""

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Nothing is left to wait for."""

    def submit(self, work: Callable[[RunConfig], dict[str, Any]], config: RunConfig) -> Future[dict[str, Any]]:
        future: Future[dict[str, Any]] = Future()
        try:
            future.set_result(work(config))
        except Exception as error:
            future.set_exception(error)
        return future


def failed_first(running: dict[Future[Any], Any], return_when: str) -> SimpleNamespace:
    """All have finished, and those that failed are looked at before the others."""
    return SimpleNamespace(done=sorted(running, key=lambda future: future.exception() is None))


@pytest.fixture
def arms() -> list[PlannedArm]:
    plan = {"groups": {"small": {**GROUP, "arms": [{"name": "dense", "overrides": {"boundary.form": "none"}}]}}}
    return parse_plan(plan, "plan.toml")["small"]


@pytest.mark.parametrize(
    ("error", "raised", "message"),
    [
        (UserError("no such text"), UserError, "no such text"),
        (BrokenProcessPool("gone"), RunFailed, "a worker process was killed"),
    ],
)
def test_a_row_that_fails_costs_none_of_those_beside_it(
    arms: list[PlannedArm],
    error: Exception,
    raised: type[Exception],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried: list[float] = []

    def train_row(config: RunConfig) -> dict[str, Any]:
        tried.append(config.train.learning_rate)
        if config.train.learning_rate == 1e-3:
            raise error
        return VALUES

    monkeypatch.setattr(training, "train_row", train_row)
    monkeypatch.setattr(runner, "_pool", lambda processes: Pool())
    monkeypatch.setattr(runner, "wait", failed_first)
    path = tmp_path / "results.jsonl"
    with pytest.raises(raised, match=message):
        runner.run(arms, path, processes=2)
    assert tried == [1e-3, 2e-3], "after a failure nothing begins"
    assert [cell.learning_rate for cell in results.load(path).losses(arms[0])] == [2e-3]
