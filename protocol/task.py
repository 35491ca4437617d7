"""What a run trains on, as the pipeline sees it: the shape of a microbatch, and which part of it crosses.

A microbatch is `[B, N]` integers, whatever they stand for:

    text     id id id ... id         N = T + 1. Input t is column t, its target column t + 1. All columns cross:
                                     every stage looks its tables up by them.
    images   pixel ... pixel label   N = H x W + 1. One target, the label. Only the label crosses: what stands for a
                                     token id is the place of a patch, which every stage knows.

The first stage reads all of it. What crosses beside the coordinates is its last `carried` columns, as integers below
`alphabet`; the last stage finds its targets there. So nothing below asks what kind of data it handles.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from protocol.config import RunConfig


@dataclass(frozen=True, slots=True)
class ImageShape:
    """Square images of one channel: pixels are integers below `levels`, labels below `classes`."""

    side: int
    levels: int
    classes: int

    def patches(self, patch: int) -> int:
        """How many patches of `patch` x `patch` pixels an image has."""
        return (self.side // patch) ** 2


IMAGE_SOURCES = {"digits": ImageShape(side=8, levels=17, classes=10)}


@dataclass(frozen=True, slots=True)
class Task:
    """The shape of a run's data.

    Attributes:
        positions: T, the positions of the residual stream for each sample.
        rows: rows of the embedding tables (frozen, first stage's, later stages'): V for text, T for images.
        outputs: how many values a target has: V for text, the classes for images.
        first_target: the column of a microbatch where the targets begin.
        carried: how many columns of a microbatch cross, counted from its end.
        alphabet: what crosses is below this.
        unit: what has a target, in the plural, for people.
    """

    positions: int
    rows: int
    outputs: int
    first_target: int
    carried: int
    alphabet: int
    unit: str


def task_of(config: RunConfig) -> Task:
    """The task that `config` describes."""
    shape = IMAGE_SOURCES.get(config.data.source)
    if shape is None:
        length, vocab = config.train.sequence_length, config.data.vocab_size
        return Task(length, vocab, vocab, first_target=1, carried=length + 1, alphabet=vocab, unit="tokens")
    positions = shape.patches(config.model.patch) + (config.model.pooling == "class")
    return Task(positions, positions, shape.classes, first_target=-1, carried=1, alphabet=shape.classes, unit="images")
