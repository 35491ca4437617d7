"""The states in a peer's files, as blobs: its own stage's checkpoints, and the copies it keeps for others."""

from __future__ import annotations

import asyncio
import logging

import torch

from peers.checkpoints import Checkpoints
from protocol.blob import Blob, BlobKey, Meta
from protocol.config import RunConfig
from protocol.errors import RunFailed
from protocol.model import flat
from protocol.model.checksum import checksum
from protocol.model.moving_basis import BASIS as MOVED
from protocol.model.stage_sizes import BASIS, state_layout
from protocol.view import View

logger = logging.getLogger(__name__)


class StageFiles:
    """Reads and writes beside the network's loop. `held` is remembered: files are looked at when one was written."""

    def __init__(self, config: RunConfig, checkpoints: Checkpoints) -> None:
        self._config, self._checkpoints = config, checkpoints
        self._held: dict[int, list[int]] | None = None
        self._reading: dict[BlobKey, asyncio.Future[Blob]] = {}

    def held(self) -> dict[int, list[int]]:
        """The steps of each stage whose state is in a file here."""
        if self._held is None:
            try:
                self._held = self._checkpoints.held()
            except OSError as error:
                logger.warning("%s cannot be looked through: %s", self._checkpoints.folder, error)
                return {}
        return self._held

    def changed(self) -> None:
        """A checkpoint was written."""
        self._held = None

    async def follow(self, view: View, former: View | None) -> None:
        """`view` may say that the run has another history than this peer knew: files of the other one are none."""
        begins = former is None or view.epoch > former.epoch
        first = view.restored + 1 if begins else None
        if await asyncio.to_thread(self._checkpoints.follow, view.skipped, first):
            self.changed()

    async def forget_after(self, step: int) -> None:
        """The run goes on from `step`: drop what is of later ones."""
        await asyncio.to_thread(self._checkpoints.forget_after, step)
        self.changed()

    async def keep(self, blob: Blob) -> None:
        """Write the state of another stage."""
        await asyncio.to_thread(self._save, blob)
        self.changed()

    def _save(self, blob: Blob) -> None:
        key = blob.key
        state = flat.unpack(blob.data, state_layout(self._config, key.stage))
        self._checkpoints.save_or_say(key.stage, key.step, state)

    async def find(self, key: BlobKey) -> Blob | None:
        """The state under `key`; None if there is no whole file of it. Who asks while it is read waits for the same."""
        if key not in self._reading:
            self._reading[key] = asyncio.ensure_future(asyncio.to_thread(self._load, key))
            self._reading[key].add_done_callback(lambda _: self._reading.pop(key))
        try:
            return await asyncio.shield(self._reading[key])
        except (RunFailed, ValueError) as error:  # ValueError: of other shapes
            self.changed()  # a damaged file is held no longer
            logger.warning("cannot hand out a state: %s", error)
            return None

    def _load(self, key: BlobKey) -> Blob:
        state = self._checkpoints.load(key.stage, key.step)
        data = flat.pack(state, state_layout(self._config, key.stage))
        return Blob.of(key, data, Meta(weights=_weights_hash(state)))


def _weights_hash(state: dict[str, torch.Tensor]) -> str:
    """What `StageEngine.weights_hash` says of a stage that has this state."""
    prefix = "weight/"
    weights = {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
    return checksum({**weights, **({BASIS: state[MOVED]} if MOVED in state else {})})
