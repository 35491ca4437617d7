"""A swarm of two replicas a stage, of real processes, as `scripts/chaos` starts and disturbs it.

Each run must end by itself, with the losses and parameters of one that nobody disturbed, and leave nothing behind. The
whole matrix is `python scripts/chaos configs/chaos.toml --matrix`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from swarm.cases import LAST_WITH_NEWCOMER, matrix
from swarm.chaos import Outcome
from swarm.chaos_command import run_case
from swarm.prepared import Prepared, prepare

from peers.config_file import format_config, read_config
from protocol.config import DataConfig

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "chaos.toml"
Disturb = Callable[[str], Outcome]

# Nothing here may fail because the machine is busy.
pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def prepared(cache: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prepared]:
    """The run that nobody disturbs; its short text is read at once."""
    folder = tmp_path_factory.mktemp("chaos")
    config = read_config(CONFIG)
    every = config.checkpoint.every
    train = config.train.model_copy(update={"steps": (every + 1 + LAST_WITH_NEWCOMER) // every * every})
    data = DataConfig(source="text", path=str(text), vocab_size=512)
    (folder / "run.toml").write_text(format_config(config.model_copy(update={"train": train, "data": data})))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ISTHMUS_CACHE", str(cache))
        yield prepare(folder / "run.toml", folder / "prepared")


@pytest.fixture
def disturb(prepared: Prepared, tmp_path: Path) -> Disturb:
    """Runs the case of that name, and sees that nothing is wrong."""
    cases = {case.name: case for case in matrix(prepared.config.pipeline.stages)}

    def run(case: str) -> Outcome:
        outcome = run_case(prepared, tmp_path / "swarm", cases[case], seconds=600)
        assert not outcome.wrong, outcome.wrong
        return outcome

    return run


def views(outcome: Outcome, words: str) -> int:
    """How many views' reasons have these words."""
    return sum(event["kind"] == "view" and words in str(event["text"]) for event in outcome.events)


def test_a_peer_killed_in_the_reduction_is_done_without(disturb: Disturb) -> None:
    outcome = disturb("reduction stage 1")
    assert views(outcome, "of stage 1 is out")


def test_a_coordinator_that_was_killed_takes_over_where_it_was(disturb: Disturb) -> None:
    outcome = disturb("coordinator killed")
    assert outcome.count("takeover") == 1
    assert views(outcome, "is out") == 0
