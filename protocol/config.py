"""The configuration of a run: one frozen, typed object. Every field says what it is; every rule is checked here.

Everything in it must be the same on every peer, so it is part of the signed manifest. What is one machine's own
affair (device, folders, ports) is not here; those are options of the commands. The sections on data and on the boundary
have files of their own, `data_config.py` and `boundary_config.py`.
"""

from __future__ import annotations

import hashlib
from typing import Any, Literal

from pydantic import Field, model_validator

from protocol import strict_json
from protocol.boundary_config import BoundaryConfig
from protocol.data_config import DataConfig
from protocol.section import Section, parse_section
from protocol.task import IMAGE_SOURCES, Task, task_of


class ModelConfig(Section):
    """A Llama-style transformer: RMSNorm, grouped-query attention, SwiGLU; in the decoder rotary positions."""

    family: Literal["decoder", "vit"] = Field(
        "decoder", description="decoder: predicts the next token of text; vit: classifies images, cut into patches"
    )
    dim: int = Field(128, ge=2, description="model width d: the residual stream's numbers per token")
    layers: int = Field(4, ge=1, description="transformer layers in the whole model")
    heads: int = Field(4, ge=1, description="query heads per layer; divides dim")
    kv_heads: int = Field(4, ge=1, description="key and value heads per layer; divides heads")
    hidden: int = Field(352, ge=1, description="width of the SwiGLU feed-forward layer")
    rope_base: float = Field(10000.0, gt=1, description="base of the rotary position frequencies")
    qk_norm: bool = Field(True, description="RMS-normalise queries and keys per head")
    norm_epsilon: float = Field(1e-5, gt=0, description="added to the mean square in RMSNorm")
    patch: int = Field(2, ge=1, description="vit: pixels on a side of a patch; divides the image's side")
    pooling: Literal["class", "mean"] = Field(
        "mean", description="vit: the head reads a class token, or the mean over all patches"
    )
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="type of parameters and arithmetic")

    @model_validator(mode="after")
    def _heads_fit(self) -> ModelConfig:
        if self.dim % self.heads:
            raise ValueError(f"expected dim divisible by heads, got dim = {self.dim}, heads = {self.heads}")
        if self.causal and (self.dim // self.heads) % 2:
            raise ValueError(
                f"expected an even width per head (rotary positions turn pairs), got dim / heads = "
                f"{self.dim} / {self.heads} = {self.dim // self.heads}"
            )
        if self.heads % self.kv_heads:
            raise ValueError(f"expected heads divisible by kv_heads, got {self.heads} and {self.kv_heads}")
        return self

    @property
    def causal(self) -> bool:
        """Whether positions have an order: each looks at earlier ones only, and rotary angles tell how far back."""
        return self.family == "decoder"


class TrainConfig(Section):
    """The optimisation: Muon or AdamW, linear warm-up, cosine decay, gradients clipped per stage."""

    steps: int = Field(300, ge=1, description="optimiser steps in the whole run; the decay ends here")
    microbatches: int = Field(8, ge=1, le=65535, description="M: microbatches per step")
    microbatch_size: int = Field(2, ge=1, description="B: sequences, or images, per microbatch")
    sequence_length: int = Field(128, ge=2, description="T: tokens per sequence of text (an image has its patches)")
    optimizer: Literal["adamw", "muon"] = Field(
        "muon",
        description="muon: orthogonal steps for the layers' matrices, AdamW for the rest and for what form projected "
        "confines; adamw: for all",
    )
    learning_rate: float = Field(1.2e-2, gt=0, description="peak learning rate")
    matrix_step: float = Field(5.0, gt=0, description="Muon: spectral norm of a matrix's step, in learning rates")
    momentum: float = Field(0.95, ge=0, lt=1, description="Muon's momentum")
    warmup_steps: int = Field(20, ge=0, description="steps of linear warm-up")
    final_learning_rate: float = Field(0.1, ge=0, le=1, description="last learning rate as a fraction of the peak")
    beta1: float = Field(0.9, ge=0, lt=1, description="AdamW's decay of the first moment")
    beta2: float = Field(0.95, ge=0, lt=1, description="AdamW's decay of the second moment")
    epsilon: float = Field(1e-8, gt=0, description="AdamW's epsilon")
    weight_decay: float = Field(
        0.1,
        ge=0,
        description="decoupled decay of matrices, times the step's rate (Muon's is matrix_step learning rates); none "
        "on embeddings and norms",
    )
    skip_nonfinite: int = Field(
        0, ge=0, le=1000, description="steps with numbers that are not finite to pass over before that ends the run"
    )
    clip_norm: float = Field(1.0, ge=0, description="largest gradient norm of one *stage* (0: no clipping)")


class PipelineConfig(Section):
    """How the model is cut and how many microbatches are under way."""

    stages: int = Field(4, ge=1, le=255, description="S: stages; divides layers")
    schedule: Literal["1f1b", "gpipe"] = Field(
        "1f1b", description="1f1b: backward before forward; gpipe: all forwards of a step first, all kept in memory"
    )
    window: int = Field(16, ge=1, description="W: 1f1b: most microbatches in flight at a stage; bounds memory")
    credits: Literal["measured", "fixed"] = Field(
        "measured",
        description="how many of the window a stage uses: measured: as many as its links and the stages below keep "
        "busy; fixed: all",
    )
    recompute: bool = Field(False, description="recompute a stage's forward in its backward instead of keeping it")


class CheckpointConfig(Section):
    """Checkpoints of each stage, in the peer's run folder."""

    every: int = Field(50, ge=1, description="steps between checkpoints; one is always written at the end")
    keep: int = Field(2, ge=1, description="newest checkpoints kept of each stage")
    copies: int = Field(
        1,
        ge=0,
        description="peers of other stages that keep a copy of each checkpoint; 0: none, the default of a launch "
        "whose peers share one machine and its disk",
    )


class RunConfig(Section):
    """A whole run, as the TOML file holds it."""

    name: str = Field("run", pattern=r"^[a-z0-9][a-z0-9-]{0,39}$", description="short name: a-z, 0-9 and -")
    seed: int = Field(0, ge=0, lt=1 << 63, description="fixes weights, basis, frozen embedding and data order")
    model: ModelConfig = Field(default_factory=lambda: ModelConfig())
    boundary: BoundaryConfig = Field(default_factory=lambda: BoundaryConfig())
    data: DataConfig = Field(default_factory=lambda: DataConfig())
    train: TrainConfig = Field(default_factory=lambda: TrainConfig())
    pipeline: PipelineConfig = Field(default_factory=lambda: PipelineConfig())
    checkpoint: CheckpointConfig = Field(default_factory=lambda: CheckpointConfig())

    @model_validator(mode="after")
    def _sections_fit(self) -> RunConfig:
        layers, stages = self.model.layers, self.pipeline.stages
        if layers % stages:
            raise ValueError(
                f"expected model.layers divisible by pipeline.stages, got {layers} layers and {stages} stages: "
                f"set pipeline.stages to one of {[n for n in range(1, layers + 1) if layers % n == 0]}"
            )
        if self.boundary.form != "none" and self.boundary.rank > self.model.dim:
            raise ValueError(
                f"expected boundary.rank of at most model.dim = {self.model.dim}, got {self.boundary.rank}: "
                f'lower it, or set boundary.form = "none" to send everything'
            )
        _check_family(self.model, self.data)
        if self.train.warmup_steps >= self.train.steps:
            raise ValueError(
                f"expected train.warmup_steps below train.steps, got {self.train.warmup_steps} and {self.train.steps}"
            )
        return self

    @property
    def task(self) -> Task:
        """What the run trains on."""
        return task_of(self)

    @property
    def tokens_per_microbatch(self) -> int:
        """B x T."""
        return self.train.microbatch_size * self.task.positions

    @property
    def tokens_per_step(self) -> int:
        """M x B x T."""
        return self.train.microbatches * self.tokens_per_microbatch

    @property
    def boundary_width(self) -> int:
        """Numbers per token that cross: k, or d for form none."""
        return self.model.dim if self.boundary.form == "none" else self.boundary.rank

    @property
    def moves_basis(self) -> bool:
        """Whether the basis moves; in a run of one stage nothing crosses, and there is nothing to gather."""
        return self.boundary.basis == "moving" and self.pipeline.stages > 1

    def with_copies(self, copies: int) -> RunConfig:
        """The same with so many copies of each checkpoint, unless their number was given."""
        if "copies" in self.checkpoint.model_fields_set:
            return self
        return self.model_copy(update={"checkpoint": self.checkpoint.model_copy(update={"copies": copies})})

    def hash(self) -> str:
        """SHA-256 of the configuration in canonical JSON, hexadecimal."""
        return hashlib.sha256(strict_json.canonical(self.model_dump())).hexdigest()


def _check_family(model: ModelConfig, data: DataConfig) -> None:
    shape = IMAGE_SOURCES.get(data.source)
    if (model.family == "vit") != (shape is not None):
        fitting = "of images" if model.family == "vit" else "of text"
        raise ValueError(
            f"expected a data.source {fitting} for model.family = {model.family!r}, got {data.source!r}: "
            f"images ({', '.join(IMAGE_SOURCES)}) go with vit, text with decoder"
        )
    if shape is not None and shape.side % model.patch:
        sides = [n for n in range(1, shape.side + 1) if shape.side % n == 0]
        raise ValueError(
            f"expected model.patch to divide the {shape.side} pixels of a side of {data.source}, got {model.patch}: "
            f"set it to one of {sides}"
        )


def parse_config(values: dict[str, Any], origin: str) -> RunConfig:
    """The configuration in `values`, the content of the TOML file (or manifest) named `origin`.

    Raises:
        ConfigError: an unknown key (the nearest known one is suggested), a wrong type or a rule broken.
    """
    return parse_section(RunConfig, values, origin, "run")
