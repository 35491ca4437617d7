"""Bytes a token on the wire: measured on real payloads, and declared for another width. All calls of codecs are here.

Measured is what the stages of the trained model send for one microbatch, ids included, without frame headers (their
share falls with the microbatch). Trained, because the length of a losslessly packed payload follows its content.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np

from convergence.meter import Case
from protocol.boundary_config import BoundaryConfig, CodecName
from protocol.config import RunConfig
from protocol.frame import Kind
from protocol.model.engine import StageEngine
from protocol.model.payload import payload_rules
from protocol.reference import ReferenceRun

# Trained without rounding, to see a form by itself: nobody would send it, and dense in float32 would flatter the rest.
METERED_AS: dict[CodecName, CodecName] = {"float32": "bfloat16"}
OPTIONS = ("block", "scale", "levels", "rotation", "lossless", "keep")


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
        payload = engine.forward(step, 0, payload, sender.codec_tag(Kind.FORWARD)).payload
    gradient, receiver = None, engines[-1]
    for engine in reversed(engines):
        gradient = engine.backward(step, 0, gradient, receiver.codec_tag(Kind.BACKWARD))
        backward += 0 if gradient is None else len(gradient)
        receiver = engine
    tokens = (len(engines) - 1) * ids.shape[0] * (ids.shape[1] - 1)
    return Wire(forward / tokens, backward / tokens) if tokens else Wire(0.0, 0.0)


def declared(config: RunConfig) -> Wire:
    """What the run's codecs declare, ids included; a bound where a payload is packed losslessly."""
    rules, tokens = payload_rules(config), config.tokens_per_microbatch
    return Wire(rules[Kind.FORWARD].most / tokens, rules[Kind.BACKWARD].most / tokens)


def at_case(config: RunConfig, case: Case, microbatches: int) -> RunConfig:
    """`config` at the width, length, vocabulary and microbatch of `case`, as it is metered.

    Only what a payload is made of is right in the result. As many numbers share a scale as did in training, where a
    token was perhaps shorter than a block: a wider token in whole blocks would be a coarser codec, and a cheaper one.
    """
    config, model = as_metered(config), config.model
    boundary = config.boundary
    rank = max(1, round(boundary.rank * case.dim / model.dim))
    size = case.tokens // case.sequence_length // microbatches
    train = config.train.model_copy(update={"microbatch_size": size, "sequence_length": case.sequence_length})
    return config.model_copy(
        update={
            "model": model.model_copy(update={"dim": case.dim}),
            "boundary": boundary.model_copy(update={"rank": rank, "block": _numbers_per_scale(config)}),
            "data": config.data.model_copy(update={"vocab_size": case.vocab}),
            "train": train,
        }
    )


def _numbers_per_scale(config: RunConfig) -> int:
    width, block = config.boundary_width, config.boundary.block
    return math.ceil(width / math.ceil(width / block))


def as_metered(config: RunConfig) -> RunConfig:
    """`config` with in bfloat16 what was trained in float32."""
    boundary = config.boundary
    gradient = boundary.gradient_codec or boundary.codec
    codecs = {
        "codec": METERED_AS.get(boundary.codec, boundary.codec),
        "gradient_codec": METERED_AS.get(gradient, gradient),
    }
    return config.model_copy(update={"boundary": boundary.model_copy(update=codecs)})


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


def is_metered_otherwise(config: RunConfig) -> bool:
    """Whether `as_metered` changes what `config` sends."""
    return declared(config) != declared(as_metered(config))


def codec_label(config: RunConfig) -> str:
    """The codecs in a table's words, with the options of a codec that are not as they are by default."""
    boundary = config.boundary
    names = [boundary.codec, boundary.gradient_codec or boundary.codec]
    label = " / ".join(dict.fromkeys(names)).replace("bfloat16", "bf16")
    default = BoundaryConfig()
    words = [
        f"{name} {getattr(boundary, name)}" for name in OPTIONS if getattr(boundary, name) != getattr(default, name)
    ]
    return ", ".join([label, *words])
