"""Checkpoints: whole or absent, of this run, the newest kept; a bad disk is found out, said once and survived."""

from __future__ import annotations

import os
import resource
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from peers import checkpoints as module
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
    for step in (50, 100, 150, 200):
        checkpoints.save(11, step, state())  # a copy of another stage's
    assert checkpoints.held() == {0: [100, 150], 11: [150, 200]}
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


def test_several_threads_may_write(checkpoints: Checkpoints) -> None:
    """The compute thread its own state, others copies of other stages'."""
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda step: checkpoints.save(0, step, state(step)), range(1, 200)))
    (steps,) = checkpoints.held().values()
    for step in steps:
        assert float(checkpoints.load(0, step)["weight/a"][0, 0]) == step


# What is read


@pytest.mark.parametrize("byte", [0, 0x55, 0xFF])
def test_no_damaged_byte_gets_through(checkpoints: Checkpoints, byte: int) -> None:
    """Wherever in the file: it is refused by name, or made no difference."""
    path = checkpoints.save(0, 50, state())
    whole, good = path.read_bytes(), checkpoints.load(0, 50)
    refused = 0
    for place in range(len(whole)):
        if whole[place] == byte:
            continue
        path.write_bytes(whole[:place] + bytes([byte]) + whole[place + 1 :])
        again = Checkpoints(checkpoints.folder, "isle-0123", keep=2)
        again.held()
        try:
            found = again.load(0, 50)
        except RunFailed as error:
            assert str(path) in str(error)
            refused += 1
        else:
            assert set(found) == set(good) and all(torch.equal(found[name], x) for name, x in good.items())
    assert refused > 0.8 * len(whole)


def spoil(path: Path) -> None:
    """Flip one bit of the last number, as a disk would: the file's length and time stay."""
    status = path.stat()
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_a_damaged_file_is_set_aside_and_the_one_before_it_serves(checkpoints: Checkpoints) -> None:
    checkpoints.save(0, 50, state())
    path = checkpoints.save(0, 100, state())
    assert checkpoints.held() == {0: [50, 100]}
    spoil(path)
    with pytest.raises(RunFailed, match=r"expected in .*step-00000100.safetensors what was written there, got other"):
        checkpoints.load(0, 100)
    for again in (checkpoints, Checkpoints(checkpoints.folder, "isle-0123", keep=2)):
        assert again.held() == {0: [50]} and again.load(0, 50)
        with pytest.raises(RunFailed, match="expected a checkpoint of stage 0, step 100"):
            again.load(0, 100)
    assert names(path.parent) == ["step-00000050.safetensors", "step-00000100.safetensors.damaged"]
    checkpoints.save(0, 100, state())
    assert checkpoints.held() == {0: [50, 100]} and checkpoints.load(0, 100)


def test_a_damaged_file_that_cannot_be_moved_is_not_held(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(checkpoints.save(0, 50, state()))

    def refuse(*_: Any) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(RunFailed, match="set aside"):
        checkpoints.load(0, 50)
    assert checkpoints.held() == {}
    with pytest.raises(RunFailed, match="expected a checkpoint of stage 0, step 50"):
        checkpoints.load(0, 50)


def test_a_file_without_its_digest_is_not_held(checkpoints: Checkpoints) -> None:
    path = checkpoints.save(0, 50, state())
    save_file(load_file(path), path, {"run": "isle-0123", "stage": "0", "step": "50"})
    assert checkpoints.held() == {}


@pytest.mark.parametrize(
    "name", ["stage-x/step-00000050", "stage-0/step-50", "stage-00/step-00000050", "stage-0/step-"]
)
def test_other_names_are_not_ours(checkpoints: Checkpoints, name: str) -> None:
    path = checkpoints.save(0, 50, state())
    odd = checkpoints.folder / f"{name}.safetensors"
    odd.parent.mkdir(exist_ok=True)
    path.rename(odd)
    assert checkpoints.held() == {}


def test_a_look_opens_a_file_once(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Peers say what they hold every few seconds."""
    opened: list[Path] = []
    really: Callable[..., Any] = module.safe_open
    monkeypatch.setattr(module, "safe_open", lambda path, **options: opened.append(path) or really(path, **options))
    paths = [checkpoints.save(0, step, state()) for step in (50, 100)]
    paths[1].write_bytes(b"torn")
    for _ in range(3):
        assert checkpoints.held() == {0: [50]}
    assert len(opened) <= 3 and caplog.text.count("ignoring the checkpoint") == 1
    checkpoints.save(0, 100, state())
    assert checkpoints.held() == {0: [50, 100]}


# Disks that fail while a run goes on


def large(step: int) -> dict[str, torch.Tensor]:
    return {"weight/a": torch.full((50_000,), float(step))}


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    """A small disk of its own."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", disk], capture_output=True).returncode:
        pytest.skip("this user cannot mount a disk")
    try:
        yield disk
    finally:
        subprocess.run(["umount", disk], check=True)


def remount(disk: Path, option: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{option}", disk], check=True)


def limit_files(size: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def assert_survives(
    checkpoints: Checkpoints, breaks: Callable[[], None], mends: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    """Steps 150 to 250 and 350 find that nothing can be written."""
    said = []

    def save(step: int) -> bool:
        saved = checkpoints.save_or_say(0, step, large(step))
        said.extend(record.getMessage() for record in caplog.records)
        caplog.clear()
        return saved

    assert save(50) and save(100) and not said
    breaks()
    try:
        assert not save(150) and not save(200) and not save(250)
        assert checkpoints.held() == {0: [50, 100]} and float(checkpoints.load(0, 100)["weight/a"][7]) == 100
    finally:
        mends()
    assert len(said) == 1 and said[0].startswith("no checkpoint of stage 0, step 150 could be written: ")
    assert said[0].endswith(f"make room on the disk, or make {checkpoints.folder} writable")
    assert save(300) and said[1:] == ["checkpoints of stage 0 are written again, from step 300 on"]
    breaks()
    try:
        assert not save(350) and len(said) == 3 and "stage 0, step 350" in said[2]
    finally:
        mends()
    assert names(checkpoints.folder / "stage-0") == ["step-00000100.safetensors", "step-00000300.safetensors"]


def test_a_full_disk(mounted: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoints = Checkpoints(mounted / "checkpoints", "isle-0123", keep=2)
    other = mounted / "films"

    def fill() -> None:
        with suppress(OSError), other.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))

    fill()
    with pytest.raises(OSError, match="No space left on device"):
        checkpoints.save(0, 50, large(50))
    other.unlink()
    assert_survives(checkpoints, fill, other.unlink, caplog)


def test_files_of_limited_size(checkpoints: Checkpoints, caplog: pytest.LogCaptureFixture) -> None:
    """Like a full disk, for a user who may not mount one."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    assert_survives(checkpoints, lambda: limit_files(100_000), lambda: limit_files(before), caplog)


def test_a_disk_that_becomes_read_only(mounted: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoints = Checkpoints(mounted / "checkpoints", "isle-0123", keep=2)
    assert_survives(checkpoints, lambda: remount(mounted, "ro"), lambda: remount(mounted, "rw"), caplog)


def test_each_stage_is_said_for_itself(checkpoints: Checkpoints, caplog: pytest.LogCaptureFixture) -> None:
    """A copy that cannot be written does not hide that the own state cannot be either, nor end the saying."""
    checkpoints.folder.mkdir()
    (checkpoints.folder / "stage-3").write_text("not a folder")
    for step in (50, 100):
        assert checkpoints.save_or_say(0, step, state())
        assert not checkpoints.save_or_say(3, step, state())
    assert len(caplog.records) == 1 and "stage 3, step 50" in caplog.text
    assert checkpoints.held() == {0: [50, 100]}
