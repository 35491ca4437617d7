"""The public case, PluralisResearch/ProtocolNanoGPT (September 2026), and how the meter reproduces it. Pure.

203,828,352 parameters, d = 1024, 8 stages of one layer on 8 H100, 524,288 tokens a step, over 200 Mbit/s + 50 ms.
Steps and seconds are those of its README and records; the microbatches (8 and 16 sequences) those of its scripts.
"""

from __future__ import annotations

from dataclasses import dataclass

from convergence.meter import Case, Link, steady_step

LINKS = (Link(200e6, 0.05), Link(80e6, 0.05))
MICROBATCHES = (4, 8, 16, 32, 64)  # each arm is metered with the best of these
FIXED_MICROBATCHES = 32  # and with this one

# The one free number is the compute. 0.29 s a stage and step gives both published step times to 0.01 %; the 0.2 s
# that eight H100 were thought to take gives them to 0.1 and 0.5 %.
CASE = Case(stages=8, dim=1024, tokens=524_288, sequence_length=1024, vocab=50_304, compute_seconds=0.29)


@dataclass(frozen=True, slots=True)
class Published:
    """A published run: bytes per token each way, steps to the target, seconds per steady step."""

    name: str
    microbatches: int
    bytes_per_token: float
    steps: int
    step_seconds: float

    def metered(self, case: Case = CASE) -> float:
        """What the meter says a step takes."""
        pipeline = case.pipeline(self.microbatches, self.bytes_per_token, self.bytes_per_token)
        return steady_step(pipeline, LINKS[0])


RUNS = (
    Published("dense bf16", 64, 2048.0, 2925, 100.5),
    Published("reparam k = 160, bf16", 32, 322.0, 9125, 19.889),
)
