"""A stage: a run of consecutive layers with what stands at its two ends.

    first stage    ids -> embed -> layers -> leave -> coordinates
    middle stage   coordinates, ids -> enter -> layers -> leave -> coordinates
    last stage     coordinates, ids -> enter -> layers -> norm, head -> logits

Parameter names are those of the whole model (layers keep their global index), so the stages' parameters together
are the model's. Each tensor is drawn from (seed, name): any peer builds any stage alone, and all agree.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from compression.boundary import FIXED_EMBEDDING_STD, Boundary, Form
from compression.seeded import normal
from protocol.config import RunConfig
from protocol.model.layers import Layer, output_embedding

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Stage(nn.Module):
    """Stage `index` of the run's model, on the CPU, with its seeded initial weights.

    Raises:
        ValueError: no such stage.
    """

    def __init__(self, config: RunConfig, index: int) -> None:
        super().__init__()
        stages, model = config.pipeline.stages, config.model
        if not 0 <= index < stages:
            raise ValueError(f"expected a stage in 0..{stages - 1}, got {index}")
        self.index, self.is_first, self.is_last = index, index == 0, index == stages - 1
        form = Form(config.boundary.form)
        vocab = config.data.vocab_size
        self.boundary = Boundary(
            form, model.dim, config.boundary.rank, vocab, config.seed, config.boundary.fixed_embedding
        )
        # After the last boundary nothing crosses any more, so the last stage writes where it likes.
        confined_to = self.boundary.basis_DK if form.confines_writes and not self.is_last else None
        if self.is_first or config.boundary.stage_embeddings:
            self.embedding = output_embedding(vocab, model.dim, confined_to)
        per_stage = model.layers // stages
        owned = range(index * per_stage, (index + 1) * per_stage)
        self.layers = nn.ModuleDict({str(layer): Layer(model, confined_to) for layer in owned})
        if self.is_last:
            self.norm = nn.RMSNorm(model.dim, model.norm_epsilon)
            self.head = nn.Linear(model.dim, vocab, bias=False)
        initialise(self, config.seed)
        self.to(DTYPES[model.dtype])

    def enter(self, ids_BT: torch.Tensor, x_BTD: torch.Tensor | None) -> torch.Tensor:
        """The residual stream with which the layers start. `x_BTD` is None for the first stage."""
        if self.is_first or x_BTD is None:
            embedded: torch.Tensor = self.embedding(ids_BT) + self.boundary.fixed(ids_BT)
            return embedded
        return x_BTD + self.embedding(ids_BT) if hasattr(self, "embedding") else x_BTD

    def body(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """The layers."""
        for layer in self.layers.values():
            x_BTD = layer(x_BTD)
        return x_BTD

    def loss(self, x_BTD: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy in nats of the next tokens, float32. Last stage only."""
        logits = self.head(self.norm(x_BTD)).float()
        return F.cross_entropy(logits.flatten(0, 1), targets_BT.flatten())

    def forward(self, ids_BT: torch.Tensor, c_BTK: torch.Tensor | None) -> torch.Tensor:
        """Coordinates for the next stage; for the last stage, the residual stream before the head.

        Args:
            ids_BT: token ids, int64.
            c_BTK: the previous stage's coordinates; None for the first stage.
        """
        x_BTD = None if c_BTK is None else self.boundary.rebuild(c_BTK.to(self.dtype), ids_BT)
        x_BTD = self.body(self.enter(ids_BT, x_BTD))
        return x_BTD if self.is_last else self.boundary.project(x_BTD, ids_BT)

    @property
    def dtype(self) -> torch.dtype:
        """The type of the parameters."""
        return next(self.parameters()).dtype


def whole_model_names(stage: Stage) -> dict[str, nn.Parameter]:
    """The stage's parameters by their names in the whole model: ends that several stages have get the stage's name."""
    prefix = f"stage{stage.index}." if not stage.is_first else ""
    return {
        (prefix + name if name.startswith("embedding.") else name): parameter
        for name, parameter in stage.named_parameters()
    }


def initialise(stage: Stage, seed: int) -> None:
    """Draw every parameter from (seed, its name in the whole model).

    Norm gains are 1. Matrices that write into the residual stream, stage embeddings, and the trainable embedding
    where a fixed one stands beside it, start at 0: the model starts as its frozen embedding, in every form. Inputs
    have deviation 1 / sqrt(inputs); the head 1 / inputs, so the first loss is that of a uniform guess.
    """
    lone_embedding = "embedding.weight" if stage.boundary.fixed_VD is None else None
    with torch.no_grad():
        for name, parameter in whole_model_names(stage).items():
            if parameter.dim() == 1:
                continue
            std = FIXED_EMBEDDING_STD if name == lone_embedding else _initial_std(name, parameter)
            parameter.copy_(normal(parameter.shape, std, seed, "weights", name)) if std else parameter.zero_()


def _initial_std(name: str, parameter: torch.Tensor) -> float:
    if ".output." in name or "embedding." in name:
        return 0.0
    if name == "head.weight":
        return 1 / parameter.shape[1]
    return 1 / math.sqrt(parameter.shape[1])
