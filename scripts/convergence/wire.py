"""Bytes a token on the wire: measured on real payloads, and declared for another width. All calls of codecs are here.

Measured is what the stages of the trained model send for one microbatch, ids included, without frame headers (their
share falls with the microbatch). Trained, because the length of a losslessly packed payload follows its content.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from convergence.meter import Case
from protocol.config import BoundaryConfig, RunConfig
from protocol.model.engine import StageEngine, payload_limits
from protocol.reference import ReferenceRun

# Trained without rounding, to see a form by itself: nobody would send it, and dense in float32 would flatter the rest.
METERED_AS = {"float32": "bfloat16"}


@dataclass(frozen=True, slots=True)
class Wire:
    """Bytes per token across one boundary, the mean over boundaries."""

    forward: float
    backward: float


def trained_engines(config: RunConfig, trained: ReferenceRun) -> list[StageEngine]:
    """The product's stages with the reference's weights and moments after its last step."""
    engines = [StageEngine(config, index) for index in range(config.pipeline.stages)]
    for engine in engines:
        engine.load(trained.state(engine.stage.index), config.train.steps)
    return engines


def measure(engines: list[StageEngine], ids: np.ndarray) -> Wire:
    """One microbatch, `[B, T + 1]`, through all stages and back."""
    step = engines[0].config.train.steps + 1
    payload, forward, backward = engines[0].forward_ids(step, 0, ids).payload, 0, 0
    for sender, engine in itertools.pairwise(engines):
        assert payload is not None
        forward += len(payload)
        payload = engine.forward(step, 0, payload, sender.codec_tag).payload
    gradient, receiver = None, engines[-1]
    for engine in reversed(engines):
        gradient = engine.backward(step, 0, gradient, receiver.codec_tag)
        backward += 0 if gradient is None else len(gradient)
        receiver = engine
    tokens = (len(engines) - 1) * ids.shape[0] * (ids.shape[1] - 1)
    return Wire(forward / tokens, backward / tokens) if tokens else Wire(0.0, 0.0)


def declared(config: RunConfig) -> Wire:
    """What the codecs of `config` declare for one of its microbatches, and the ids of a forward."""
    forward, backward = payload_limits(config)
    return Wire(forward / config.tokens_per_microbatch, backward / config.tokens_per_microbatch)


def at_case(config: RunConfig, case: Case, microbatches: int) -> RunConfig:
    """`config` at the width, length, vocabulary and microbatch of `case`, as it is metered.

    Only what a payload is made of is right in the result.
    """
    config, model = as_metered(config), config.model
    boundary = config.boundary
    rank = max(1, round(boundary.rank * case.dim / model.dim))
    size = case.tokens // case.sequence_length // microbatches
    train = config.train.model_copy(update={"microbatch_size": size, "sequence_length": case.sequence_length})
    return config.model_copy(
        update={
            "model": model.model_copy(update={"dim": case.dim}),
            "boundary": boundary.model_copy(update={"rank": rank}),
            "data": config.data.model_copy(update={"vocab_size": case.vocab}),
            "train": train,
        }
    )


def as_metered(config: RunConfig) -> RunConfig:
    """`config` with coordinates in bfloat16 if they were trained in float32."""
    codec = METERED_AS.get(config.boundary.codec, config.boundary.codec)
    return config.model_copy(update={"boundary": config.boundary.model_copy(update={"codec": codec})})


def metered(config: RunConfig, measured: Wire, metered: RunConfig) -> Wire:
    """Bytes per token of `metered`, a variant of `config`: declared, times what payloads measured of their declaration.

    That factor is 1 but for codecs that declare an upper limit (lossless packing).
    """
    own, other = declared(config), declared(metered)
    return Wire(other.forward * measured.forward / own.forward, other.backward * measured.backward / own.backward)


def dense_at_case(case: Case, microbatches: int) -> Wire:
    """Bytes per token of the dense model in bfloat16."""
    dense = RunConfig(boundary=BoundaryConfig(form="none", codec="bfloat16"))
    return declared(at_case(dense, case, microbatches))


def codec_label(config: RunConfig) -> str:
    """The codec in a table's words: every field of it that is not as it is by default."""
    return config.boundary.codec.replace("bfloat16", "bf16")
