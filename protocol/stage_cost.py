"""What a stage asks of the peer that serves it: floating-point operations a microbatch, bytes of memory. Approximate.

Matrices: a product with a matrix of n numbers takes 2 n operations a position, its backward twice that, a forward that
is computed again another 2 n. With d width, h hidden, g key and value heads of H, W the width that is written (k where
the stream is held in coordinates, else d):

    layer       2 d d g/H + d d (query) + d W (attention's output) + 2 d h + h W
    attention   4 T d operations a position (half of it where a position looks back only), no numbers
    ends        k d a boundary; where the stream is held in coordinates, k d for each of a layer's two reads
    head        d x outputs, at the scored positions

Bytes: weights and gradients in their type; in float32 both moments, and the sum, a part and the total that replicas
exchange; the float32 copy that bfloat16 is updated in; the frozen embedding; and what a forward leaves for its
backward, about 10 d + 3 h numbers a position and layer, for each microbatch in flight, or for one if it is computed
again.
"""

from __future__ import annotations

from dataclasses import dataclass

from protocol.config import RunConfig


@dataclass(frozen=True, slots=True)
class StageCost:
    """`gflop`: of one microbatch, forward and backward, in 1e9 operations. `memory`: bytes."""

    gflop: float = 1.0
    memory: int = 0


def stage_costs(config: RunConfig) -> tuple[StageCost, ...]:
    """The cost of each stage of a run."""
    return tuple(StageCost(_gflop(config, stage), _memory(config, stage)) for stage in range(config.pipeline.stages))


def parameters(config: RunConfig, stage: int) -> int:
    """How many numbers the stage trains, but for the gains of its norms."""
    return _layer_numbers(config, stage) * _layers(config) + _table(config, stage) + _ends(config, stage)


def _layers(config: RunConfig) -> int:
    return config.model.layers // config.pipeline.stages


def _is_last(config: RunConfig, stage: int) -> bool:
    return stage == config.pipeline.stages - 1


def _written(config: RunConfig, stage: int) -> int:
    holds_coordinates = config.boundary.form == "reparam" and not _is_last(config, stage)
    return config.boundary.rank if holds_coordinates else config.model.dim


def _layer_numbers(config: RunConfig, stage: int) -> int:
    model, written = config.model, _written(config, stage)
    key_value = 2 * model.dim * (model.dim // model.heads) * model.kv_heads
    return key_value + model.dim * (model.dim + written) + model.hidden * (2 * model.dim + written)


def _table(config: RunConfig, stage: int) -> int:
    boundary, rows, written = config.boundary, config.task.rows, _written(config, stage)
    if stage == 0:
        return rows * written
    if not boundary.stage_embeddings:
        return 0
    size = boundary.stage_embedding_size
    sizes = {"table": rows * written, "low_rank": size * (rows + written), "bigram": size * written}
    return sizes[boundary.stage_embedding]


def _ends(config: RunConfig, stage: int) -> int:
    model, patches = config.model, config.model.family == "vit"
    entry = model.patch**2 * _written(config, stage) if stage == 0 and patches else 0
    return entry + (model.dim * config.task.outputs if _is_last(config, stage) else 0)


def _gflop(config: RunConfig, stage: int) -> float:
    model, task, k = config.model, config.task, config.boundary_width
    attention = 4 * task.positions * model.dim * (0.5 if model.causal else 1.0)
    rebuilds = 4 * k * model.dim if _written(config, stage) < model.dim else 0
    position = _layers(config) * (2 * _layer_numbers(config, stage) + attention + rebuilds)
    if config.boundary.form != "none":
        position += 2 * k * model.dim * ((stage > 0) + (not _is_last(config, stage)))
    scored = task.positions if model.causal else 1
    head = 2 * model.dim * task.outputs * scored if _is_last(config, stage) else 0
    forward = config.train.microbatch_size * (task.positions * position + head)
    return forward * (4 if config.pipeline.recompute else 3) / 1e9


def _memory(config: RunConfig, stage: int) -> int:
    model, train = config.model, config.train
    size = 4 if model.dtype == "float32" else 2
    a_number = 2 * size + 5 * 4 + (4 if size == 2 else 0)
    frozen = config.task.rows * model.dim * 4 if config.boundary.fixed_embedding else 0
    most = min(config.pipeline.window, train.microbatches) if config.pipeline.schedule == "1f1b" else train.microbatches
    in_flight = 1 if config.pipeline.recompute else most
    kept = in_flight * config.tokens_per_microbatch * _layers(config) * (10 * model.dim + 3 * model.hidden) * size
    logits = config.tokens_per_microbatch * config.task.outputs * 8 if _is_last(config, stage) else 0
    return parameters(config, stage) * a_number + frozen + kept + logits
