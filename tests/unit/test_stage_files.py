"""States in files, as blobs: kept, found, and read once however many ask."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from peers.checkpoints import Checkpoints
from peers.stage_files import StageFiles
from protocol.blob import Blob, BlobKey, BlobKind
from protocol.model import flat
from protocol.model.stage_sizes import state_layout

KEY = BlobKey(BlobKind.STATE, 1, 4)


def test_what_is_kept_is_found_and_read_once(
    small_run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_run().config
    files = StageFiles(config, Checkpoints(tmp_path, "isle-0123", keep=2))
    numbers = np.arange(flat.size(state_layout(config, 1)) // 4, dtype=np.float32)
    reads: list[int] = []
    load = Checkpoints.load

    def counted(self: Checkpoints, stage: int, step: int) -> Any:
        reads.append(step)
        return load(self, stage, step)

    monkeypatch.setattr(Checkpoints, "load", counted)

    async def scene() -> None:
        await files.keep(Blob.of(KEY, numbers.data))
        assert files.held() == {1: [4]}
        found = await asyncio.gather(*(files.find(KEY) for _ in range(5)))
        assert all(blob is not None and bytes(blob.data) == numbers.tobytes() for blob in found)
        assert reads == [4]
        assert await files.find(KEY) is not None and reads == [4, 4]

    asyncio.run(scene())


def test_what_is_not_whole_is_not_found(small_run: Callable[..., Any], tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, "isle-0123", keep=2)
    files = StageFiles(small_run().config, checkpoints)

    async def scene() -> None:
        assert await files.find(KEY) is None
        checkpoints.save(1, 4, flat.unpack(bytes(8), {"weight/other": (2,)}))  # of other shapes
        assert await files.find(KEY) is None

    asyncio.run(scene())


def test_a_disk_that_cannot_be_read_holds_nothing_and_ends_nothing(
    small_run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(tmp_path, "isle-0123", keep=2)
    files = StageFiles(small_run().config, checkpoints)
    checkpoints.save(1, 4, {"weight/x": torch.ones(2)})

    def broken(*_: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "glob", broken)
        assert files.held() == {}
        asyncio.run(files.forget_after(0))
    assert files.held() == {1: [4]}
