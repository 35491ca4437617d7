"""What a later stage adds to the stream from the ids that it receives anyway: its own trainable embedding.

    table      a row per id                                 V x W numbers
    low_rank   a short row per id, widened by one matrix    V x r + r x W
    bigram     a row per hashed pair of ids (the token's and the one before it)     r x W

No bytes on the wire and no large matrix product. A table of a large model is as big as its stage: at V = 50,000 and
W = 4,096 it holds 205 M numbers, 2.5 GB with AdamW's moments, which the stage's replicas must average. The other two
are for that. All start as 0, so the stage starts as if they were not there.

Shape suffixes: B batch, T time, W width of the held stream.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from protocol.boundary_config import BoundaryConfig

_32_BITS = (1 << 32) - 1
_ODD = 0x45D9F3B  # of 27 bits: times a number of 32 bits it stays below 2^63


class LowRankEmbedding(nn.Module):
    """`short` has `rank` numbers per id; `widen`, which starts at 0, makes W of them."""

    def __init__(self, rows: int, rank: int, width: int) -> None:
        super().__init__()
        self.short = nn.Embedding(rows, rank)
        self.widen = nn.Linear(rank, width, bias=False)

    def forward(self, ids_BT: torch.Tensor) -> torch.Tensor:
        """`[B, T] -> [B, T, W]`."""
        widened: torch.Tensor = self.widen(self.short(ids_BT))
        return widened


class BigramEmbedding(nn.Module):
    """A row for each bucket of pairs. Pairs that share a bucket share the row."""

    def __init__(self, buckets: int, width: int) -> None:
        super().__init__()
        self.pairs = nn.Embedding(buckets, width)

    def forward(self, ids_BT: torch.Tensor) -> torch.Tensor:
        """`[B, T] -> [B, T, W]`. The first token of a sequence counts as following id 0."""
        before_BT = F.pad(ids_BT, (1, 0))[:, :-1]
        embedded: torch.Tensor = self.pairs(hash_pairs(before_BT, ids_BT, self.pairs.num_embeddings))
        return embedded


def hash_pairs(before: torch.Tensor, ids: torch.Tensor, buckets: int) -> torch.Tensor:
    """A bucket in 0..buckets-1 for each pair of ids in 0..2^32-1, int64; the same on every device.

    Of 32 bits, the ids that follow one id are all different, and so are those before one id; buckets then share them
    as if they were drawn at random.
    """
    return _mixed((_mixed(before) + ids) & _32_BITS) % buckets


def _mixed(x: torch.Tensor) -> torch.Tensor:
    """A permutation of 0..2^32-1 in which each bit depends on all: high bits are folded into low ones, a product by
    an odd number carries low bits into high ones. Exact in int64.
    """
    for _ in range(2):
        x = ((x ^ (x >> 16)) * _ODD) & _32_BITS
    return x ^ (x >> 16)


def stage_embedding(boundary: BoundaryConfig, rows: int, width: int) -> nn.Module:
    """The embedding of a later stage, of the kind that the run asks for, for ids in 0..rows-1."""
    makers: dict[str, Callable[[], nn.Module]] = {
        "table": lambda: nn.Embedding(rows, width),
        "low_rank": lambda: LowRankEmbedding(rows, boundary.stage_embedding_size, width),
        "bigram": lambda: BigramEmbedding(boundary.stage_embedding_size, width),
    }
    return makers[boundary.stage_embedding]()
