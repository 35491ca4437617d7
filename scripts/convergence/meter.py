"""The meter: how long a step takes on given links, by a rule that anyone can check. Pure.

The rule is that of PluralisResearch/ProtocolNanoGPT (`SimPipelineStage.add_delay`, torch's `Schedule1F1B`):

    one inbound wire per stage, shared by forwards from the stage before and gradients from the stage after;
    a message starts when it is sent and the wire is free, and lands, and frees the wire, bits / bandwidth + latency
    later; the wire carries messages in the order in which its stage works on them

    stage 0  F0 F1 F2 F3 . . . B0 F4 B1 F5 B2 ...     1F1B: S - s forwards, then backward and forward in turn,
    stage 1     F0 F1 F2 . . B0 F3 B1 F4 B2 ...       then the backwards that are left; f seconds a forward, 2 f a
    stage 2        F0 F1 . B0 F2 B1 F3 B2 ...         backward; a stage begins its next step when its last backward
    stage 3           F0 B0 F1 B1 F2 B2 ...           is done, and waits for nobody else

The latency holds the wire too: that is the rule's, not a real wire's, and it is the same for every arm.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

Operation = tuple[Literal["F", "B"], int]  # kind, microbatch


@dataclass(frozen=True, slots=True)
class Link:
    """A wire: bits per second, and seconds that every message takes besides."""

    bandwidth: float
    latency: float

    def seconds(self, bits: float) -> float:
        """From a message's start to its landing."""
        return bits / self.bandwidth + self.latency

    def __str__(self) -> str:
        return f"{self.bandwidth / 1e6:g} Mbit/s + {self.latency * 1e3:g} ms"


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A step's shape.

    Attributes:
        stages: S.
        microbatches: M.
        forward_seconds: a stage's forward of one microbatch; its backward takes twice as long.
        forward_bits: of one microbatch's forward message; `backward_bits` of its gradient.
    """

    stages: int
    microbatches: int
    forward_seconds: float
    forward_bits: float
    backward_bits: float


@dataclass(frozen=True, slots=True)
class Case:
    """A model on its stages, without the codec.

    Attributes:
        tokens: per step.
        compute_seconds: of one stage for a whole step, forwards and backwards.
    """

    stages: int
    dim: int
    tokens: int
    sequence_length: int
    vocab: int
    compute_seconds: float

    def pipeline(self, microbatches: int, forward_bytes: float, backward_bytes: float) -> Pipeline:
        """The step with these bytes per token in `microbatches` microbatches."""
        bits = 8 * self.tokens / microbatches
        seconds = self.compute_seconds / (3 * microbatches)
        return Pipeline(self.stages, microbatches, seconds, bits * forward_bytes, bits * backward_bytes)


def work_order(stage: int, stages: int, microbatches: int) -> Iterator[Operation]:
    """The operations of `stage` in one step: 1F1B."""
    ahead = min(microbatches, stages - stage)
    yield from (("F", m) for m in range(ahead))
    for m in range(microbatches):
        yield "B", m
        if ahead + m < microbatches:
            yield "F", ahead + m


def step_ends(pipeline: Pipeline, link: Link, steps: int) -> list[float]:
    """When each of `steps` steps from a standing start has ended at all stages, in seconds."""
    stages = [_Stage(pipeline, link, index) for index in range(pipeline.stages)]
    ends = []
    for _ in range(steps):
        for stage in stages:
            stage.begin_step()
        while any(stage.advance(stages) for stage in stages):
            pass
        ends.append(max(stage.free for stage in stages))
    return ends


def steady_step(pipeline: Pipeline, link: Link) -> float:
    """Seconds from the end of a step to the end of the next.

    Stage 0 ends each step and begins the next, so that steps do not overlap and all take the same time.
    """
    first, second = step_ends(pipeline, link, 2)
    return second - first


class _Stage:
    """A stage at work: what it has sent, when it and its wire are free."""

    def __init__(self, pipeline: Pipeline, link: Link, index: int) -> None:
        self._pipeline, self._index = pipeline, index
        self._lands = {"F": link.seconds(pipeline.forward_bits), "B": link.seconds(pipeline.backward_bits)}
        self._seconds = {"F": pipeline.forward_seconds, "B": 2 * pipeline.forward_seconds}
        self.free = self._wire_free = 0.0
        self.done: dict[Operation, float] = {}
        self._todo: list[Operation] = []

    def begin_step(self) -> None:
        """The next step's operations wait; the last step's are done."""
        self.done, self._todo = {}, list(work_order(self._index, self._pipeline.stages, self._pipeline.microbatches))
        self._todo.reverse()

    def advance(self, stages: Sequence[_Stage]) -> bool:
        """Work until the next message that nobody has sent yet; whether anything was done."""
        moved = False
        while self._todo and (ready := self._arrival(self._todo[-1], stages)) is not None:
            operation = self._todo.pop()
            self.free = self.done[operation] = max(self.free, ready) + self._seconds[operation[0]]
            moved = True
        return moved

    def _arrival(self, operation: Operation, stages: Sequence[_Stage]) -> float | None:
        """When its message has landed; None: it is not sent yet."""
        source = self._index + (-1 if operation[0] == "F" else 1)
        if not 0 <= source < len(stages):
            return 0.0
        sent = stages[source].done.get(operation)
        if sent is None:
            return None
        self._wire_free = max(self._wire_free, sent) + self._lands[operation[0]]
        return self._wire_free
