"""Bytes a token on the wire: measured on real payloads, and declared for another width. All calls of codecs are here.

Measured is what the stages of the trained model send for one microbatch, ids included, without frame headers (their
share falls with the microbatch). Trained, because the length of a losslessly packed payload follows its content.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from protocol.config import RunConfig
from protocol.frame import Kind
from protocol.model.engine import StageEngine
from protocol.model.payload import payload_rules
from protocol.reference import ReferenceRun


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
