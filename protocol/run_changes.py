"""What of a run's configuration may change between two parts of the run, when it is resumed, and why. Pure.

Fixed is what the states in the files are made for (their shape, and the function that they are weights of), and what a
sample of (step, microbatch) means. All else may change at a step that all stages have: how fast it learns, how long,
how it rounds, how it is scheduled, what it keeps.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from protocol.config import RunConfig
from protocol.errors import UserError


@dataclass(frozen=True, slots=True)
class Rule:
    """Whether a field may change, and why, or why not."""

    may_change: bool
    why: str


_RUN_ID = Rule(False, "the run's id, by which folders and invites name it, begins with it")
_DRAWS = Rule(False, "it fixes the basis, the frozen embedding and which samples a step has")
_SHAPE = Rule(False, "the states in the files have the shape that it gives them")
_FUNCTION = Rule(False, "the weights in the files are weights of another function with it")
_SAMPLE = Rule(False, "what (step, microbatch) means follows from it: samples would be left out or come twice")
_MOMENTS = Rule(False, "the optimiser's moments in the files are the other's")

_UPDATE = Rule(True, "it says how a step is taken, and nothing of where the last one ended")
_LENGTH = Rule(True, "the run may be shorter or longer; the rate's decay ends with it")
_MOTION = Rule(True, "it says when and how far a basis moves, and nothing of where it is")
_WIRE = Rule(True, "it says how numbers are rounded on the wire; no state and no sample knows of it")
_ORDER = Rule(True, "it says in which order and how many at a time; the sums are the same")
_FILES = Rule(True, "it says what is written when and where, and nothing of what")
_PLACE = Rule(True, "the files may lie elsewhere; their fingerprint must be the run's")

RULES: dict[str, Rule] = {
    "name": _RUN_ID,
    "seed": _DRAWS,
    "model.family": _FUNCTION,
    "model.dim": _SHAPE,
    "model.layers": _SHAPE,
    "model.heads": _FUNCTION,
    "model.kv_heads": _SHAPE,
    "model.hidden": _SHAPE,
    "model.rope_base": _FUNCTION,
    "model.qk_norm": _SHAPE,
    "model.norm_epsilon": _FUNCTION,
    "model.patch": _SHAPE,
    "model.pooling": _FUNCTION,
    "model.dtype": _FUNCTION,
    "boundary.form": _SHAPE,
    "boundary.rank": _SHAPE,
    "boundary.basis": _SHAPE,
    "boundary.basis_path": _PLACE,
    "boundary.move_every": _MOTION,
    "boundary.move_rate": _MOTION,
    "boundary.scaled_basis": _FUNCTION,
    "boundary.codec": _WIRE,
    "boundary.gradient_codec": _WIRE,
    "boundary.rates": _WIRE,
    "boundary.least_codec": _WIRE,
    "boundary.least_gradient_codec": _WIRE,
    "boundary.block": _WIRE,
    "boundary.scale": _WIRE,
    "boundary.levels": _WIRE,
    "boundary.rotation": _WIRE,
    "boundary.lossless": _WIRE,
    "boundary.keep": _WIRE,
    "boundary.fixed_embedding": _FUNCTION,
    "boundary.stage_embeddings": _SHAPE,
    "boundary.stage_embedding": _SHAPE,
    "boundary.stage_embedding_size": _SHAPE,
    "data.source": _SAMPLE,
    "data.path": _PLACE,
    "data.field": _PLACE,
    "data.vocab_size": _SHAPE,
    "data.tokenizer": _PLACE,
    "train.steps": _LENGTH,
    "train.microbatches": _SAMPLE,
    "train.microbatch_size": _SAMPLE,
    "train.sequence_length": _SAMPLE,
    "train.optimizer": _MOMENTS,
    "train.learning_rate": _UPDATE,
    "train.matrix_step": _UPDATE,
    "train.momentum": _UPDATE,
    "train.warmup_steps": _UPDATE,
    "train.final_learning_rate": _UPDATE,
    "train.beta1": _UPDATE,
    "train.beta2": _UPDATE,
    "train.epsilon": _UPDATE,
    "train.weight_decay": _UPDATE,
    "train.skip_nonfinite": _UPDATE,
    "train.clip_norm": _UPDATE,
    "pipeline.stages": _SHAPE,
    "pipeline.schedule": _ORDER,
    "pipeline.window": _ORDER,
    "pipeline.credits": _ORDER,
    "pipeline.recompute": _ORDER,
    "checkpoint.every": _FILES,
    "checkpoint.keep": _FILES,
    "checkpoint.copies": _FILES,
}


@dataclass(frozen=True, slots=True)
class Change:
    """One field's old and new value."""

    field: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.field} {_shown(self.old)} -> {_shown(self.new)}"


def changes(old: RunConfig, new: RunConfig) -> list[Change]:
    """The fields that differ, in the order of the configuration."""
    before = dict(fields(old))
    return [Change(field, before[field], value) for field, value in fields(new) if before[field] != value]


def check_changes(found: Iterable[Change], where: str) -> None:
    """Check that each of the fields may change. `where`: the run's folder, for the message.

    Raises:
        UserError: some may not; all of them are named.
    """
    fixed = [change for change in found if not RULES[change.field].may_change]
    if fixed:
        named = "; ".join(f"{change} ({RULES[change.field].why})" for change in fixed)
        raise UserError(
            f"expected in the run in {where} no other value of what a run keeps for good, got {named}: set it back, or "
            "start a new run in another folder; the other fields that differ may change"
        )


def fields(section: BaseModel, prefix: str = "") -> Iterable[tuple[str, Any]]:
    """Each field by its dotted name, and its value."""
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            yield from fields(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _shown(value: Any) -> str:
    return "none" if value is None else f"{value!r}" if isinstance(value, str) else str(value)
