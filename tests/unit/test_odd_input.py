"""What comes from outside in odd forms: reports, states, checkpoints, configurations."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from peers.checkpoints import Checkpoints
from peers.config_file import format_config, read_config
from peers.step_reports import StepReport, WireTotals
from peers.step_table import StepTable
from protocol.config import RunConfig, parse_config
from protocol.errors import BadFrame, ConfigError
from protocol.model.layers import rotate
from protocol.optimizer import StageOptimizer

GOOD = StepReport(7, 1, 2.0, 1.0, 0.1, 1.0, 1.0, WireTotals()).to_json()


@pytest.mark.parametrize(
    "change",
    ['{"step": 1e999}', '{"stage": Infinity}', '{"wire": [1e999, 0, 0, 0, 0, 0, 0]}', '{"loss": 1%s}' % ("0" * 400)],
    ids=["step 1e999", "stage inf", "wire 1e999", "loss 10**400"],
)
def test_report_overflow(change: str) -> None:
    """Numbers that overflow are refused like any other nonsense."""
    with pytest.raises(BadFrame):
        StepReport.from_json({**GOOD, **json.loads(change)})


@pytest.mark.parametrize("change", [{"wire": [1, 2]}, {"wire": "1234567"}, {"wire": [-1] * 7}, {"step": 1.9}])
def test_report_lax(change: dict[str, object]) -> None:
    """other forms than to_json's are taken for reports (docstring: BadFrame)."""
    with pytest.raises(BadFrame):
        StepReport.from_json({**GOOD, **change})


def test_pending_reports_are_bounded() -> None:
    """one peer can fill the coordinator's memory with reports of steps far ahead."""
    table = StepTable(RunConfig())
    for step in range(10_000, 30_000):
        table.add(StepReport.from_json({**GOOD, "step": step}))
    assert len(table._pending) < 10_000


def test_what_was_just_saved_is_kept(tmp_path: Path) -> None:
    """A run resumed further back (keep=1: or from step 0) deletes each new checkpoint as it is written."""
    checkpoints = Checkpoints(tmp_path, "run", keep=2)
    for step in (100, 150):
        checkpoints.save(0, step, {"weight/a": torch.zeros(1)})
    path = checkpoints.save(0, 50, {"weight/a": torch.zeros(1)})  # no common step: all begin at 0 again
    assert path.exists()


def test_another_runs_checkpoints_do_not_crowd_out_ours(tmp_path: Path) -> None:
    """`_prune` goes by file name; held() and load() go by the run in the file."""
    for step in (100, 150):
        Checkpoints(tmp_path, "other", keep=2).save(0, step, {"weight/a": torch.zeros(1)})
    assert Checkpoints(tmp_path, "run", keep=2).save(0, 50, {"weight/a": torch.zeros(1)}).exists()


def test_labels_missing(tmp_path: Path) -> None:
    """A file without labels is no checkpoint of ours."""
    (tmp_path / "stage-0").mkdir()
    save_file({"a": torch.zeros(1)}, tmp_path / "stage-0" / "step-00000001.safetensors", {"run": "run"})
    assert Checkpoints(tmp_path, "run", 2).held() == {}


@pytest.mark.parametrize("shape", [(3, 3), (1, 2), (2,)])
def test_load_of_other_shapes(shape: tuple[int, ...]) -> None:
    """Documented: ValueError.."""
    named = {"a.weight": nn.Parameter(torch.zeros(2, 2))}
    state = {f"{part}/a.weight": torch.ones(shape) for part in ("weight", "moment1", "moment2")}
    with pytest.raises(ValueError):
        StageOptimizer(named, RunConfig().train).load(state, 1)


def test_infinite_values_in_the_configuration(tmp_path: Path) -> None:
    """An infinite rope_base is refused, or at least prints as TOML that reads back."""
    try:
        config = parse_config({"model": {"rope_base": math.inf}}, "x")
    except ConfigError:
        return
    (tmp_path / "x.toml").write_text(format_config(config))
    assert read_config(tmp_path / "x.toml") == config


def test_del_in_a_path(tmp_path: Path) -> None:
    """JSON leaves U+007F bare, TOML forbids it."""
    config = parse_config({"data": {"source": "text", "path": "a\x7fb"}}, "x")
    (tmp_path / "x.toml").write_text(format_config(config))
    assert read_config(tmp_path / "x.toml") == config


def test_rotate_keeps_float64() -> None:
    """A stage in float64 computes in float64, which the textbook proof relies on."""
    x = torch.randn(1, 1, 3, 4, dtype=torch.float64)
    ones, zeros = torch.ones(3, 2), torch.zeros(3, 2)
    assert torch.equal(rotate(x, ones, zeros), x)
