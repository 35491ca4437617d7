"""The learning rate of each step. Pure."""

from __future__ import annotations

import math

from protocol.config import TrainConfig


def learning_rate(step: int, train: TrainConfig) -> float:
    """The learning rate of `step`."""
    return train.learning_rate * peak_fraction(step, train)


def peak_fraction(step: int, train: TrainConfig) -> float:
    """Linear warm-up to 1, then a cosine to `final_learning_rate` at `train.steps`. Steps start at 1."""
    if step <= train.warmup_steps:
        return step / train.warmup_steps
    progress = min(1.0, (step - train.warmup_steps) / max(1, train.steps - train.warmup_steps))
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return train.final_learning_rate + (1 - train.final_learning_rate) * cosine
