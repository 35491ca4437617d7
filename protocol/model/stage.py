"""A stage: a run of consecutive layers with what stands at its two ends.

    first stage    ids -> enter -> layers -> leave -> coordinates
    middle stage   coordinates, ids -> enter -> layers -> leave -> coordinates
    last stage     coordinates, ids -> enter -> layers -> norm, pool, head -> loss

Ids are the rows of the embedding tables: token ids of text, places of patches in images (`protocol.model.families`).

Parameter names are those of the whole model (layers keep their global index), so the stages' parameters together
are the model's. Each tensor is drawn from (seed, name): any peer builds any stage alone, and all agree.

How the stream is held. What was written so far is r, what a layer reads is x = r + E_fixed[t]. In form `reparam` all
that is written before the last boundary is U @ (Z h): r is always U @ c. So those stages hold c and add Z h to it,
and read x = c @ U.T + E_fixed[t]. The boundary then sends the stream itself: it is lossless to the last bit, and the
output matrices are k, not d, wide. In form `projected` the same matrices are d wide, and the optimiser keeps them
inside span(U) (`protocol.confined_adamw`).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from compression.basis import inside
from compression.boundary import FIXED_EMBEDDING_STD, Boundary, Form
from compression.seeded import normal
from protocol.config import RunConfig
from protocol.confined_adamw import Confinement
from protocol.model.families import FAMILIES, Family
from protocol.model.layers import Layer
from protocol.model.moving_basis import MovingBasis
from protocol.model.stage_embedding import stage_embedding

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class StageParameters(nn.Module):
    """The parameters of stage `index` and where its stream is held; nothing is drawn yet.

    Under `torch.device("meta")` it takes no memory: so a peer knows the sizes of a stage that it does not serve.

    Raises:
        ValueError: no such stage.
    """

    def __init__(self, config: RunConfig, index: int) -> None:
        super().__init__()
        stages, model, task = config.pipeline.stages, config.model, config.task
        if not 0 <= index < stages:
            raise ValueError(f"expected a stage in 0..{stages - 1}, got {index}")
        self.index, self.is_first, self.is_last = index, index == 0, index == stages - 1
        form = Form(config.boundary.form)
        self.family: Family = FAMILIES[model.family](config)
        # After the last boundary nothing crosses any more, so the last stage writes where it likes.
        self.confined = form.confines_writes and not self.is_last
        self.holds_coordinates = form.holds_coordinates and not self.is_last
        written = config.boundary.rank if self.holds_coordinates else model.dim
        if self.is_first:
            self.embedding: nn.Module = nn.Embedding(task.rows, written)
        elif config.boundary.stage_embeddings:
            self.embedding = stage_embedding(config.boundary, task.rows, written)
        self.patch_embedding = self.family.content(written) if self.is_first else None
        per_stage = model.layers // stages
        owned = range(index * per_stage, (index + 1) * per_stage)
        self.layers = nn.ModuleDict({str(layer): Layer(model, written) for layer in owned})
        if self.is_last:
            self.norm = nn.RMSNorm(model.dim, model.norm_epsilon)
            self.head = nn.Linear(model.dim, task.outputs, bias=False)


class Stage(StageParameters):
    """Stage `index` of the run's model, on the CPU, with its seeded initial weights.

    Args:
        basis_DK: the basis of a run with `boundary.basis = "file"`.

    Raises:
        ValueError: no such stage, or no basis for a run that is given one.
    """

    def __init__(self, config: RunConfig, index: int, basis_DK: torch.Tensor | None = None) -> None:
        super().__init__(config, index)
        if (config.boundary.basis == "file") is not (basis_DK is not None):
            raise ValueError(f'expected a basis exactly with boundary.basis = "file", got "{config.boundary.basis}"')
        self.boundary = Boundary(
            Form(config.boundary.form),
            config.model.dim,
            config.boundary.rank,
            config.task.rows,
            config.seed,
            config.boundary.fixed_embedding,
            config.boundary.scaled_basis,
            basis_DK,
        )
        rate = config.boundary.move_rate
        self.moving = MovingBasis(self.boundary, rate, self.is_last) if config.moves_basis else None
        initialise(self, config.seed)
        self.to(DTYPES[config.model.dtype])

    def enter(self, inputs_BN: torch.Tensor, c_BTK: torch.Tensor | None) -> torch.Tensor:
        """The stream with which the layers start, `[B, T, W]`. `c_BTK` is None for the first stage."""
        ids_BT = self.family.rows(inputs_BN)
        if c_BTK is None:
            embedded: torch.Tensor = self.embedding(ids_BT)
            return embedded if self.patch_embedding is None else embedded + self.patch_embedding(inputs_BN)
        stream_BTW = c_BTK if self.holds_coordinates else self.boundary.rebuild(c_BTK)
        if self.moving is not None:
            self.moving.watch(stream_BTW)
        if hasattr(self, "embedding"):
            stream_BTW = stream_BTW + self.embedding(ids_BT)
        return stream_BTW

    def body(self, inputs_BN: torch.Tensor, stream_BTW: torch.Tensor) -> torch.Tensor:
        """The layers."""
        read = self._reader(inputs_BN)
        for layer in self.layers.values():
            stream_BTW = layer(stream_BTW, read)
        return stream_BTW

    def leave(self, stream_BTW: torch.Tensor) -> torch.Tensor:
        """The coordinates `[B, T, K]` for the next stage."""
        return stream_BTW if self.holds_coordinates else self.boundary.project(stream_BTW)

    def logits(self, inputs_BN: torch.Tensor, stream_BTD: torch.Tensor) -> torch.Tensor:
        """A row for each target, in the order of the flattened targets, in float32 at least. Last stage only."""
        logits: torch.Tensor = self.head(self.family.pool(self.norm(self._reader(inputs_BN)(stream_BTD))))
        return logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, -2)

    def loss(self, inputs_BN: torch.Tensor, stream_BTD: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy in nats of the next tokens `[B, T]` or the labels `[B, 1]`. Last stage only."""
        return F.cross_entropy(self.logits(inputs_BN, stream_BTD), targets.flatten())

    def forward(self, inputs_BN: torch.Tensor, c_BTK: torch.Tensor | None) -> torch.Tensor:
        """Coordinates for the next stage; for the last stage, the stream before the head.

        Args:
            inputs_BN: the microbatch without its last column, int64: token ids `[B, T]`; pixels, at the first stage.
            c_BTK: the previous stage's coordinates; None for the first stage.
        """
        c_BTK = None if c_BTK is None else c_BTK.to(self.dtype)
        stream_BTW = self.body(inputs_BN, self.enter(inputs_BN, c_BTK))
        return stream_BTW if self.is_last else self.leave(stream_BTW)

    def _reader(self, inputs_BN: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        fixed_BTD = self.boundary.fixed(self.family.rows(inputs_BN))
        if self.holds_coordinates:
            return lambda c_BTK: self.boundary.rebuild(c_BTK) + fixed_BTD
        return lambda r_BTD: r_BTD + fixed_BTD

    @property
    def dtype(self) -> torch.dtype:
        """The type of the parameters."""
        return next(self.parameters()).dtype


def whole_model_names(stage: StageParameters) -> dict[str, nn.Parameter]:
    """The stage's parameters by their names in the whole model: ends that several stages have get the stage's name."""
    prefix = f"stage{stage.index}." if not stage.is_first else ""
    return {
        (prefix + name if name.startswith("embedding.") else name): parameter
        for name, parameter in stage.named_parameters()
    }


def confined_axes(stage: StageParameters) -> dict[str, int]:
    """The parameters whose writes lie inside span(U), each with the axis along which the stream lies."""
    if not stage.confined:
        return {}
    return {name: 1 if "embedding." in name else 0 for name in whole_model_names(stage) if _writes(name)}


def confinement(stage: Stage) -> Confinement | None:
    """What the optimiser must keep inside span(U); None where the stage's form or place has nothing of it."""
    basis_DK = stage.boundary.exact_DK
    if basis_DK is None or not stage.confined:
        return None
    return Confinement(basis_DK, confined_axes(stage), full_size=not stage.holds_coordinates)


def _writes(name: str) -> bool:
    return ".output." in name or "embedding." in name


def initialise(stage: Stage, seed: int) -> None:
    """Draw every parameter from (seed, its name in the whole model).

    Norm gains are 1. Matrices that write into the residual stream, stage embeddings, and the trainable embedding
    where a fixed one stands beside it, start at 0: the model starts as its frozen embedding, in every form. Inputs
    have deviation 1 / sqrt(inputs); the head 1 / inputs, so the first loss is that of a uniform guess. What must lie
    in span(U) is the part in it of what was drawn.
    """
    lone_embedding = "embedding.weight" if stage.boundary.fixed_VD is None else None
    confined = confinement(stage)
    with torch.no_grad():
        for name, parameter in whole_model_names(stage).items():
            if parameter.dim() == 1:
                continue
            std = FIXED_EMBEDDING_STD if name == lone_embedding else _initial_std(name, parameter)
            parameter.copy_(normal(parameter.shape, std, seed, "weights", name)) if std else parameter.zero_()
            if std and confined is not None and confined.full_size and name in confined.axes:
                parameter.copy_(inside(parameter, confined.basis_DK, confined.axes[name]))


def _initial_std(name: str, parameter: torch.Tensor) -> float:
    if name == "patch_embedding.weight":  # the one content of an image's stream, of a deviation of about 1
        return 1 / math.sqrt(parameter.shape[0])
    if name.endswith("embedding.short.weight"):  # the matrix that widens it starts at 0
        return 1.0
    if _writes(name):
        return 0.0
    if name == "head.weight":
        return 1 / parameter.shape[1]
    return 1 / math.sqrt(parameter.shape[1])
