"""The smaller stage embeddings: what they hold, that they begin as nothing, that they learn, and their hash."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from protocol.boundary_config import BoundaryConfig
from protocol.errors import ConfigError
from protocol.model.stage import Stage, whole_model_names
from protocol.model.stage_embedding import hash_pairs, stage_embedding
from protocol.reference import ReferenceRun

pytestmark = pytest.mark.kernels

KINDS = {"table": 300 * 8, "low_rank": 300 * 5 + 5 * 8, "bigram": 5 * 8}


def made(kind: str) -> torch.nn.Module:
    boundary = BoundaryConfig.model_validate({"stage_embedding": kind, "stage_embedding_size": 5})
    return stage_embedding(boundary, rows=300, width=8)


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_has_its_size_and_shape(kind: str) -> None:
    module = made(kind)
    assert sum(parameter.numel() for parameter in module.parameters()) == KINDS[kind]
    assert module(torch.randint(0, 300, (2, 7))).shape == (2, 7, 8)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", ["bottleneck", "reparam"])
def test_a_stage_begins_as_if_it_had_none_and_then_learns_it(
    small_run: Callable[..., Any], kind: str, form: str
) -> None:
    boundary = {"form": form, "stage_embedding": kind, "stage_embedding_size": 5, "codec": "float32"}
    run = small_run(boundary=boundary, train={"learning_rate": 1e-2})
    without = small_run(boundary=boundary | {"stage_embeddings": False}, train={"learning_rate": 1e-2})
    ids = run.tokens.microbatch(run.config, 1, 0)
    reference, bare = ReferenceRun(run.config), ReferenceRun(without.config)
    assert float(reference.loss(ids).detach()) == float(bare.loss(ids).detach())
    reference.step(1, [ids])
    reference.step(2, [ids])
    bare.step(1, [ids])
    bare.step(2, [ids])
    assert float(reference.loss(ids).detach()) != float(bare.loss(ids).detach())
    state = reference.state(1)
    rows = [tensor for name, tensor in state.items() if name.startswith("weight/stage1.embedding.")]
    assert rows and all(bool(tensor.any()) for tensor in rows)


@pytest.mark.parametrize("buckets", [4096, 8192, 65536, 10_007])
def test_pairs_that_share_an_id_spread_as_if_drawn_at_random(buckets: int) -> None:
    """The followers of an id are what its row must tell apart, and so are the ids that one follows."""
    ids = torch.arange(1024)
    table = hash_pairs(ids[:, None], ids[None, :], buckets)
    expected = buckets * (1 - (1 - 1 / buckets) ** 1024)
    for pairs in (table, table.T):
        used = torch.tensor([float(len(row.unique())) for row in pairs])
        assert float(used.mean()) == pytest.approx(expected, rel=0.01) and float(used.min()) > 0.9 * expected


def test_pairs_fall_into_all_buckets_evenly() -> None:
    ids = torch.arange(1024)
    counts = np.bincount(hash_pairs(ids[:, None], ids[None, :], 512).flatten().numpy(), minlength=512)
    # 2,048 a bucket on average; were they drawn at random, the deviation would be 45.
    assert len(counts) == 512 and counts.min() > 1800 and counts.max() < 2300


def test_a_pair_is_known_by_both_of_its_ids() -> None:
    ids = torch.arange(64)
    table = hash_pairs(ids[:, None], ids[None, :], 1 << 20)
    assert len(table.unique()) > 0.98 * 64 * 64


def test_buckets_are_exact_for_the_largest_ids() -> None:
    """Against Python's integers, which have no largest: what overflowed would differ between devices."""

    def mixed(x: int) -> int:
        for _ in range(2):
            x = ((x ^ (x >> 16)) * 0x45D9F3B) % 2**32
        return x ^ (x >> 16)

    ids = [0, 1, 49_999, (1 << 31) - 1, 1 << 31, (1 << 32) - 1]
    table = hash_pairs(torch.tensor(ids)[:, None], torch.tensor(ids)[None, :], 1 << 24)
    assert table.tolist() == [[mixed((mixed(before) + own) % 2**32) % (1 << 24) for own in ids] for before in ids]


def test_the_first_token_has_a_pair_too() -> None:
    module = made("bigram")
    torch.nn.init.normal_(next(module.parameters()))
    one, two = torch.tensor([[7, 9, 7, 9]]), torch.tensor([[7, 9, 1, 9]])
    first, second = module(one), module(two)
    assert torch.equal(first[:, :2], second[:, :2])
    assert torch.equal(first[:, 1], first[:, 3])
    assert not torch.equal(first[:, 3], second[:, 3])


def test_low_rank_rows_in_form_projected_are_refused(small_run: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match='expected stage_embedding = "table" or "bigram"'):
        small_run(boundary={"form": "projected", "stage_embedding": "low_rank"})


def test_names_are_those_of_the_whole_model(small_run: Callable[..., Any]) -> None:
    config = small_run(boundary={"stage_embedding": "low_rank", "stage_embedding_size": 3}).config
    names = whole_model_names(Stage(config, 1))
    assert {"stage1.embedding.short.weight", "stage1.embedding.widen.weight"} < set(names)
