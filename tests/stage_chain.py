"""A chain of stages in one process that pass bytes to one another, as peers would; what several files of tests need."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import torch

from protocol.basis_microbatch import is_moving_step
from protocol.config import RunConfig, parse_config
from protocol.frame import Kind
from protocol.model.engine import StageEngine

VOCAB, BATCH, LENGTH, MICROBATCHES = 260, 2, 6, 3
Tensors = dict[str, torch.Tensor]


def run_config(
    form: str = "bottleneck",
    codec: str = "float32",
    recompute: bool = False,
    stages: int = 3,
    model: dict[str, Any] | None = None,
    boundary: dict[str, Any] | None = None,
    seed: int = 5,
    learning_rate: float = 0.02,
    train: dict[str, Any] | None = None,
) -> RunConfig:
    return parse_config(
        {
            "seed": seed,
            "model": {
                "dim": 16, "layers": max(3, stages), "heads": 4, "kv_heads": 2, "hidden": 24, **(model or {}),
            },
            "boundary": {"form": form, "rank": 4, "codec": codec, **(boundary or {})},
            "data": {"vocab_size": VOCAB},
            "train": {
                "microbatches": MICROBATCHES, "microbatch_size": BATCH, "sequence_length": LENGTH,
                "learning_rate": learning_rate, "warmup_steps": 2, "steps": 50, **(train or {}),
            },
            "pipeline": {"stages": stages, "recompute": recompute},
        },
        "test",
    )  # fmt: skip


def microbatches(step: int) -> list[np.ndarray]:
    drawn = np.random.default_rng(step)
    return [drawn.integers(0, VOCAB, (BATCH, LENGTH + 1)) for _ in range(MICROBATCHES)]


def chain(config: RunConfig) -> list[StageEngine]:
    return [StageEngine(config, index) for index in range(config.pipeline.stages)]


def forward(engines: list[StageEngine], step: int, microbatch: int, ids: np.ndarray) -> float:
    """One microbatch through all stages; its loss."""
    result = engines[0].forward_ids(step, microbatch, ids)
    for sender, engine in pairwise(engines):
        assert result.loss is None and result.payload is not None
        result = engine.forward(step, microbatch, bytes(result.payload), sender.codec_tag(Kind.FORWARD))
    assert result.loss is not None and result.payload is None
    return result.loss


def backward(engines: list[StageEngine], step: int, microbatch: int) -> None:
    payload, codec = None, 0
    for engine in reversed(engines):
        sent = engine.backward(step, microbatch, payload, codec)
        payload, codec = None if sent is None else bytes(sent), engine.codec_tag(Kind.BACKWARD)
    assert payload is None


def backward_basis(engines: list[StageEngine]) -> None:
    """The basis microbatch."""
    payload = None
    for engine in reversed(engines):
        sent = engine.backward_basis(payload)
        payload = None if sent is None else bytes(sent)
    assert payload is None


def train(
    engines: list[StageEngine], step: int, batches: list[np.ndarray], moves: bool = True
) -> tuple[list[float], Tensors]:
    """A step with all microbatches in flight: losses, and mean gradients by name.

    Args:
        moves: with its basis microbatch, if it has one.
    """
    losses = [forward(engines, step, m, ids) for m, ids in enumerate(batches)]
    for m in range(len(batches)):
        backward(engines, step, m)
    if moves and is_moving_step(engines[0].config, step):
        backward_basis(engines)
    gradients: Tensors = {}
    for engine in engines:
        gradients |= {name: gradient.clone() for name, gradient in engine.average().items()}
        engine.apply(step)
    return losses, gradients


def copied(state: Tensors) -> Tensors:
    return {name: tensor.clone() for name, tensor in state.items()}


def same(a: Tensors, b: Tensors) -> bool:
    return set(a) == set(b) and all(torch.equal(a[name], b[name]) for name in a)
