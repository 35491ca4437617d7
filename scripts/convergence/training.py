"""One row: a configuration in, everything that is known of it out. Runs in a worker process of its own."""

from __future__ import annotations

import math
import os
import threading
import time
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from compression.errors import CodecError
from convergence.wire import measure, trained_engines
from peers.data.token_store import TokenStore
from peers.opening import load_tokens
from protocol.config import RunConfig
from protocol.data_config import DataConfig
from protocol.errors import RunFailed
from protocol.model.stage import Stage, whole_model_names
from protocol.reference import ReferenceRun

WINDOWS = 256  # held-out windows, the same for every arm
CURVE_WINDOWS = 64  # of them, evenly spread, for each point of the curve but the last
CURVE_BATCH = 16
CURVE_POINTS = 8
TRAIN_POINTS = 60

Values = dict[str, Any]


def prepare_worker(parent: int) -> None:
    """Make this process a worker of `parent`: one thread, what the machine has to spare, and no life after it."""
    be_modest()
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def be_modest() -> None:
    """One thread, and only what the machine has to spare. For waiting threads the environment says it, see `runner`."""
    os.nice(10)
    torch.set_num_threads(1)


def _end_with(parent: int) -> None:
    """A pool's worker whose parent was killed would wait for work for ever."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def train_row(config: RunConfig) -> Values:
    """Train `config` and evaluate it.

    Returns:
        What is measured, JSON-serialisable. Losses in nats per token; curves are lists of [step, loss].

    Raises:
        UserError: the data is missing or too small.
    """
    start, tokens = time.monotonic(), _tokens(config.data)
    run = _Training(config, tokens)
    diverged = run.train()
    values: Values = {"diverged": diverged, "held_out_loss": None, "held_out_error": None, "wire": None}
    if diverged is None:
        values |= run.final()
    return (
        values
        | run.sizes()
        | run.curves()
        | {
            "held_out_windows": WINDOWS,
            "seconds": round(time.monotonic() - start, 2),
            "torch": torch.__version__,
            "data": {"fingerprint": tokens.fingerprint, "unigram_loss": tokens.unigram_loss},
        }
    )


class _Training:
    """A reference run on its way, with its curves."""

    def __init__(self, config: RunConfig, tokens: TokenStore) -> None:
        self._config, self._tokens = config, tokens
        self._reference = ReferenceRun(config)
        self._losses: list[float] = []
        self._held_out: list[tuple[int, float]] = []

    def train(self) -> str | None:
        """All steps; why it diverged, or None."""
        steps = self._config.train.steps
        evaluated = {round(steps * point / CURVE_POINTS) for point in range(1, CURVE_POINTS)} - {0, steps}
        try:
            for step in range(1, steps + 1):
                losses, _ = self._reference.step(step, self._microbatches(step))
                self._losses.append(sum(losses) / len(losses))
                if step in evaluated:
                    self._held_out.append((step, self._mean_of_some()))
            last = self._mean_of_some()
        except (RunFailed, CodecError) as error:
            return str(error)
        guess = math.log(self._config.data.vocab_size)
        # An overflow may end in zeros, and at a uniform guess but for rounding. Written so that a NaN diverged, too.
        return (
            None
            if last < guess - 1e-4
            else f"final held-out loss {last:.3f}, expected less than the {guess:.3f} of a uniform guess"
        )

    def curves(self) -> Values:
        """Held-out and training loss over steps; each point of the latter is the mean of the steps since the last."""
        stride = math.ceil(self._config.train.steps / TRAIN_POINTS)
        parts = [self._losses[at : at + stride] for at in range(0, len(self._losses), stride)]
        train = [(at * stride + len(part), sum(part) / len(part)) for at, part in enumerate(parts)]
        return {"held_out_curve": _finite(self._held_out), "train_curve": _finite(train)}

    def final(self) -> Values:
        """The loss over all windows, its standard error, and the bytes on the wire."""
        with torch.no_grad():
            losses = np.array([float(self._reference.loss(window[None])) for window in self._windows()])
        engines = trained_engines(self._config, self._reference)
        wire = measure(engines, self._microbatches(self._config.train.steps + 1)[0])
        self._held_out.append((self._config.train.steps, float(losses.mean())))
        return {
            "held_out_loss": float(losses.mean()),
            "held_out_error": float(losses.std(ddof=1) / math.sqrt(WINDOWS)),
            "wire": {"forward": wire.forward, "backward": wire.backward},
        }

    def sizes(self) -> Values:
        """Trainable parameters, and the bytes of weights and optimiser moments."""
        stages = [whole_model_names(Stage(self._config, index)) for index in range(self._config.pipeline.stages)]
        counts = [sum(parameter.numel() for parameter in stage.values()) for stage in stages]
        embeddings = sum(p.numel() for stage in stages for name, p in stage.items() if "embedding." in name)
        states = [self._reference.state(index).values() for index in range(len(stages))]
        return {
            "parameters": {"total": sum(counts), "per_stage": counts, "embeddings": embeddings},
            "state_bytes": sum(tensor.nbytes for state in states for tensor in state),
        }

    def _mean_of_some(self) -> float:
        some = self._windows()[:: WINDOWS // CURVE_WINDOWS]
        batches = [some[first : first + CURVE_BATCH] for first in range(0, CURVE_WINDOWS, CURVE_BATCH)]
        with torch.no_grad():
            return sum(float(self._reference.loss(batch)) for batch in batches) / len(batches)

    def _windows(self) -> np.ndarray:
        """`[WINDOWS, T + 1]`, the same for every arm."""
        return _held_out(self._config.data, self._config.train.sequence_length)

    def _microbatches(self, step: int) -> list[np.ndarray]:
        return [self._tokens.microbatch(self._config, step, m) for m in range(self._config.train.microbatches)]


@lru_cache(maxsize=4)
def _tokens(data: DataConfig) -> TokenStore:
    return load_tokens(RunConfig(data=data))


@lru_cache(maxsize=4)
def _held_out(data: DataConfig, length: int) -> np.ndarray:
    return _tokens(data).held_out_microbatch(0, WINDOWS, length)


def _finite(curve: list[tuple[int, float]]) -> list[list[float]]:
    return [[step, round(loss, 6)] for step, loss in curve if math.isfinite(loss)]
