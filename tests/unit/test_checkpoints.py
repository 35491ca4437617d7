"""Checkpoints: whole or absent, of this run, the newest kept."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from peers.checkpoints import Checkpoints
from protocol.errors import RunFailed


def state(value: float = 1.0) -> dict[str, torch.Tensor]:
    return {"weight/a": torch.full((2, 3), value), "moment1/a": torch.arange(6.0).reshape(3, 2).T}


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    return Checkpoints(tmp_path / "checkpoints", "isle-0123", keep=2)


def test_a_checkpoint_comes_back_to_the_bit(checkpoints: Checkpoints) -> None:
    path = checkpoints.save(3, 50, state())
    assert path == checkpoints.folder / "stage-3" / "step-00000050.safetensors"
    loaded = checkpoints.load(3, 50)
    assert set(loaded) == set(state()) and all(torch.equal(loaded[name], x) for name, x in state().items())


def test_the_newest_of_each_stage_are_held(checkpoints: Checkpoints) -> None:
    assert checkpoints.held() == {}
    for step in (50, 100, 150):
        checkpoints.save(0, step, state(step))
    checkpoints.save(11, 50, state())
    assert checkpoints.held() == {0: [100, 150], 11: [50]}
    assert names(checkpoints.folder / "stage-0") == ["step-00000100.safetensors", "step-00000150.safetensors"]
    assert float(checkpoints.load(0, 150)["weight/a"][0, 0]) == 150


def test_a_step_is_written_again_in_place(checkpoints: Checkpoints) -> None:
    checkpoints.save(0, 50, state(1.0))
    checkpoints.save(0, 50, state(2.0))
    assert checkpoints.held() == {0: [50]} and float(checkpoints.load(0, 50)["weight/a"][0, 0]) == 2.0


@pytest.mark.parametrize("keep", [0, 1, 7, 8, 9, 100, -1])
def test_a_torn_file_is_not_held(checkpoints: Checkpoints, keep: int, caplog: pytest.LogCaptureFixture) -> None:
    checkpoints.save(0, 50, state())
    path = checkpoints.save(0, 100, state())
    path.write_bytes(path.read_bytes()[:keep])
    assert checkpoints.held() == {0: [50]}
    assert "ignoring the checkpoint" in caplog.text
    with pytest.raises(RunFailed, match="expected a checkpoint of stage 0, step 100 of run isle-0123 at"):
        checkpoints.load(0, 100)
    assert checkpoints.load(0, 50)


def test_another_runs_checkpoint_is_not_ours(checkpoints: Checkpoints) -> None:
    checkpoints.save(0, 50, state())
    other = Checkpoints(checkpoints.folder, "isle-9999", keep=2)
    assert other.held() == {}
    with pytest.raises(RunFailed, match="of run isle-9999"):
        other.load(0, 50)


def test_a_file_under_another_name_is_not_loaded_for_it(checkpoints: Checkpoints) -> None:
    path = checkpoints.save(0, 50, state())
    path.rename(path.with_name("step-00000060.safetensors"))
    for stage, step in ((0, 50), (0, 60), (1, 50)):
        with pytest.raises(RunFailed, match=f"expected a checkpoint of stage {stage}, step {step}"):
            checkpoints.load(stage, step)


def test_leftovers_of_a_killed_writer_go_and_other_files_stay(checkpoints: Checkpoints) -> None:
    folder = checkpoints.save(0, 50, state()).parent
    (folder / ".step-00000099.safetensors.x1y2.tmp").write_bytes(b"half")
    (folder / "notes.txt").write_text("mine")
    assert checkpoints.held() == {0: [50]}
    checkpoints.save(0, 100, state())
    assert names(folder) == ["notes.txt", "step-00000050.safetensors", "step-00000100.safetensors"]


@pytest.mark.parametrize("error", [PermissionError(13, "Permission denied"), OSError(28, "No space left on device")])
def test_a_failed_write_leaves_the_old_ones(
    checkpoints: Checkpoints, error: OSError, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (50, 100):
        checkpoints.save(0, step, state(step))

    def fail(_: int) -> None:
        raise error

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match=str(error.strerror)):
        checkpoints.save(0, 150, state())
    assert names(checkpoints.folder / "stage-0") == ["step-00000050.safetensors", "step-00000100.safetensors"]
    assert float(checkpoints.load(0, 50)["weight/a"][0, 0]) == 50


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_leaves_the_old_ones(checkpoints: Checkpoints) -> None:
    folder = checkpoints.save(0, 50, state()).parent
    folder.chmod(0o555)
    try:
        with pytest.raises(PermissionError):
            checkpoints.save(0, 100, state())
        assert names(folder) == ["step-00000050.safetensors"] and checkpoints.held() == {0: [50]}
    finally:
        folder.chmod(0o755)


def test_a_file_where_the_folder_should_be(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("not a folder")
    with pytest.raises(OSError, match="checkpoints"):
        Checkpoints(tmp_path / "checkpoints", "isle-0123", 2).save(0, 50, state())
    assert Checkpoints(tmp_path / "checkpoints", "isle-0123", 2).held() == {}
