"""The toy model: exact, cheap, and as particular as a real one.

Stage s holds a weight w_s among the integers modulo a prime, and maps x to w_s * x. The last stage's loss is
(y - target)^2 / 2. Beside the weight a stage has a moment of its gradients and ballast that follows the moments, so
that its state takes several chunks and one that lacks a part of it is noticed.

A step's sum over microbatches is a plain sum modulo the prime, the same in every order, so whatever died, the weights
must be exactly those of a plain loop (`sequential`). A microbatch that is lost, counted twice or computed on other
weights changes everything after it, and for good.

Every `move_every` steps there is a basis microbatch (`protocol.basis_microbatch`): the last stage answers it with a
number made of the pull that it gathered in the applied steps since the last move; it goes up from stage to stage, it is
in the part of the replica that was sent it, and each stage multiplies its weight by it after the update of that step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from protocol.frame import Buffer

PRIME = (1 << 61) - 1
RATE, DECAY = 12_345, 678
NUMBER_BYTES = 8
SUMS = 3  # gradient, pull, basis


class NotFinite(ArithmeticError):
    """The numbers of a step are none that anybody could go on with."""


class Garbage(ValueError):
    """Numbers that are none of the model's."""


@dataclass(frozen=True)
class ToyRun:
    """What is the same at all peers: the model's sizes, how many microbatches a step has, and in which steps, at which
    stages, numbers are not finite.
    """

    seed: int
    stages: int
    microbatches: int
    ballast: int
    move_every: int
    not_finite: tuple[tuple[int, int], ...] = ()

    @property
    def skipped(self) -> tuple[int, ...]:
        """The steps that are passed over in the end."""
        return tuple(sorted({step for step, _ in self.not_finite}))

    def moves(self, step: int) -> bool:
        """Whether the basis moves at the end of `step`."""
        return self.move_every > 0 and step % self.move_every == 0

    def count(self, step: int) -> int:
        """The microbatches of `step`, the basis microbatch among them."""
        return self.microbatches + self.moves(step)

    @property
    def state_bytes(self) -> int:
        """The size of a stage's state."""
        return NUMBER_BYTES * (3 + self.ballast)

    def sample(self, step: int, microbatch: int) -> tuple[int, int]:
        """The input and the target of a microbatch."""
        return drawn("x", self.seed, step, microbatch), drawn("target", self.seed, step, microbatch)


@dataclass(frozen=True)
class ToyState:
    """All that a stage is after a step."""

    weight: int
    moment: int = 0
    pull: int = 0
    ballast: tuple[int, ...] = ()

    @classmethod
    def first(cls, run: ToyRun, stage: int) -> ToyState:
        """What the seed gives."""
        return cls(
            drawn("w", run.seed, stage), ballast=tuple(drawn("b", run.seed, stage, i) for i in range(run.ballast))
        )

    def after(self, run: ToyRun, step: int, sums: Sequence[int]) -> ToyState:
        """The state after an update by the step's sums of gradients and pulls, and by its new basis."""
        gradient, pull, basis = sums
        moment = (DECAY * self.moment + gradient * pow(run.microbatches, -1, PRIME)) % PRIME
        weight = (self.weight - RATE * moment) % PRIME
        ballast = tuple((number * (i + 2) + moment) % PRIME for i, number in enumerate(self.ballast))
        if run.moves(step):
            return ToyState(weight * basis % PRIME, moment, 0, ballast)
        return ToyState(weight, moment, (self.pull + pull) % PRIME, ballast)

    def pack(self) -> bytes:
        """As bytes."""
        return pack([self.weight, self.moment, self.pull, *self.ballast])

    @classmethod
    def unpack(cls, data: bytes) -> ToyState:
        """From bytes.

        Raises:
            Garbage: they hold a number that is none.
        """
        weight, moment, pull, *ballast = unpack(data)
        return cls(weight, moment, pull, tuple(ballast))

    @property
    def hash(self) -> str:
        """The hash of the weights; of the moments, which the optimiser keeps, it tells nothing."""
        return hashlib.blake2b(pack([self.weight, *self.ballast]), digest_size=8).hexdigest()

    def new_basis(self) -> int:
        """What the basis moves to; never 0."""
        return drawn("basis", self.pull) | 1


@dataclass
class ToyStage:
    """What a peer holds in its memory: its stage's state and the step under way."""

    run: ToyRun
    stage: int
    state: ToyState
    inputs: dict[int, int] = field(default_factory=dict)
    gathered: list[int] = field(default_factory=list)
    sums: list[int] = field(default_factory=lambda: [0] * SUMS)

    @property
    def is_last(self) -> bool:
        """Whether it makes the loss."""
        return self.stage == self.run.stages - 1

    def forward(self, step: int, microbatch: int, payload: int | None) -> int | None:
        """The coordinates for the next stage; None at the last one, where the loss needs none."""
        assert microbatch not in self.inputs, f"forward of {microbatch} again, its activations are still here"
        assert microbatch not in self.gathered, f"forward of {microbatch}, whose gradient is in the sum"
        if self._is_basis(microbatch):
            x = 0
        elif self.stage == 0:
            x = self.run.sample(step, microbatch)[0]
        else:
            assert payload is not None
            x = payload
        self.inputs[microbatch] = x
        return None if self.is_last else x * self.state.weight % PRIME

    def backward(self, step: int, microbatch: int, payload: int | None) -> int | None:
        """The gradient for the previous stage; None at the first one."""
        x = self.inputs.pop(microbatch)
        assert microbatch not in self.gathered, f"backward of {microbatch} again"
        self.gathered.append(microbatch)
        if self._is_basis(microbatch):
            basis = self.state.new_basis() if self.is_last else payload
            assert basis
            self.sums[2] = basis
            return None if self.stage == 0 else basis
        gradient = x * self.state.weight - self.run.sample(step, microbatch)[1] if self.is_last else payload
        assert gradient is not None
        self.sums[0] = (self.sums[0] + gradient * x) % PRIME
        self.sums[1] = (self.sums[1] + gradient * gradient * self.is_last) % PRIME
        return None if self.stage == 0 else gradient * self.state.weight % PRIME

    def reset(self, microbatches: Sequence[int] | None) -> None:
        """Forget activations of some microbatches, or all of the step."""
        if microbatches is None:
            self.clear()
        for microbatch in microbatches or ():
            assert microbatch not in self.gathered, f"{microbatch} cannot be taken out of the sum"
            self.inputs.pop(microbatch, None)

    def apply(self, step: int, sums: Sequence[int]) -> None:
        """End the step."""
        self.state = self.state.after(self.run, step, sums)
        self.clear()

    def clear(self) -> None:
        """Forget the step under way."""
        self.inputs.clear()
        self.gathered.clear()
        self.sums = [0] * SUMS

    def _is_basis(self, microbatch: int) -> bool:
        return microbatch == self.run.microbatches


def sequential(run: ToyRun, steps: int, skipped: Collection[int] = ()) -> list[list[ToyState]]:
    """The states after each step from 0 to `steps`, by one plain loop, which passes over `skipped`."""
    states = [ToyState.first(run, stage) for stage in range(run.stages)]
    after = [states]
    for step in range(1, steps + 1):
        if step in skipped:
            after.append(states)
            continue
        stages = [ToyStage(run, number, state) for number, state in enumerate(states)]
        for microbatch in range(run.count(step)):
            tensor: int | None = None
            for stage in stages:
                tensor = stage.forward(step, microbatch, tensor)
            for stage in reversed(stages):
                tensor = stage.backward(step, microbatch, tensor)
        states = [stage.state.after(run, step, stage.sums) for stage in stages]
        after.append(states)
    return after


def added(parts: Sequence[Sequence[int]]) -> list[int]:
    """The sum of parts."""
    return [sum(numbers) % PRIME for numbers in zip(*parts, strict=True)]


def drawn(*what: object) -> int:
    """A fixed number for `what`, uniform modulo the prime."""
    return int.from_bytes(hashlib.blake2b(repr(what).encode(), digest_size=16).digest(), "little") % PRIME


def pack(numbers: Sequence[int]) -> bytes:
    """As bytes."""
    return b"".join(number.to_bytes(NUMBER_BYTES, "little") for number in numbers)


def unpack(data: Buffer) -> list[int]:
    """The numbers in `data`.

    Raises:
        Garbage: one is not below the prime.
    """
    starts = range(0, len(data), NUMBER_BYTES)
    numbers = [int.from_bytes(data[start : start + NUMBER_BYTES], "little") for start in starts]
    if any(number >= PRIME for number in numbers):
        raise Garbage("expected numbers below the prime")
    return numbers


GARBAGE = PRIME + 7  # what a bad peer sends for a tensor
