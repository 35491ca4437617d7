"""The decoder's layers. Where a module writes into the residual stream, its output matrix comes from outside, since
only the boundary's form decides whether that matrix is full or confined to span(U).

Shape suffixes: B batch, T time, D model width, H query heads, G key/value heads, E width per head, K coordinates.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import nn

from protocol.config import ModelConfig


class SubspaceLinear(nn.Module):
    """A linear map whose output lies in span(U): W = U @ Z with trainable Z `[K, in]` (form `reparam`)."""

    def __init__(self, inputs: int, basis_DK: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(basis_DK.shape[1], inputs))
        self.register_buffer("basis_DK", basis_DK, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., in] -> [..., D]`."""
        return F.linear(x, self.weight) @ self.get_buffer("basis_DK").T


class SubspaceEmbedding(nn.Module):
    """A trainable embedding inside span(U): rows `Z[t] @ U.T`."""

    def __init__(self, vocab: int, basis_DK: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(vocab, basis_DK.shape[1]))
        self.register_buffer("basis_DK", basis_DK, persistent=False)

    def forward(self, ids_BT: torch.Tensor) -> torch.Tensor:
        """`[B, T] -> [B, T, D]`."""
        return F.embedding(ids_BT, self.weight) @ self.get_buffer("basis_DK").T


def output_linear(inputs: int, dim: int, confined_to: torch.Tensor | None) -> nn.Module:
    """A matrix that writes into the residual stream: full, or inside the span of `confined_to` `[D, K]`."""
    if confined_to is None:
        return nn.Linear(inputs, dim, bias=False)
    return SubspaceLinear(inputs, confined_to)


def output_embedding(vocab: int, dim: int, confined_to: torch.Tensor | None) -> nn.Module:
    """An embedding that writes into the residual stream: full, or inside the span of `confined_to` `[D, K]`."""
    return nn.Embedding(vocab, dim) if confined_to is None else SubspaceEmbedding(vocab, confined_to)


def rotary_angles(length: int, width: int, base: float, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines `[T, E / 2]` of the rotary positions (Su et al. 2021, arXiv 2104.09864, section 3.2)."""
    frequencies = base ** (-torch.arange(0, width, 2, dtype=torch.float32, device=device) / width)
    angles = torch.arange(length, dtype=torch.float32, device=device)[:, None] * frequencies
    return angles.cos(), angles.sin()


def rotate(x_BHTE: torch.Tensor, cos_TE: torch.Tensor, sin_TE: torch.Tensor) -> torch.Tensor:
    """Turn each pair (first half, second half) of the head's numbers by its position's angle."""
    first, second = x_BHTE.float().chunk(2, dim=-1)
    turned = torch.cat((first * cos_TE - second * sin_TE, first * sin_TE + second * cos_TE), dim=-1)
    return turned.to(x_BHTE.dtype)


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions."""

    def __init__(self, config: ModelConfig, confined_to: torch.Tensor | None) -> None:
        super().__init__()
        self.config = config
        width = config.dim // config.heads
        self.query = nn.Linear(config.dim, config.heads * width, bias=False)
        self.key = nn.Linear(config.dim, config.kv_heads * width, bias=False)
        self.value = nn.Linear(config.dim, config.kv_heads * width, bias=False)
        self.output = output_linear(config.heads * width, config.dim, confined_to)
        self.query_norm = nn.RMSNorm(width, config.norm_epsilon) if config.qk_norm else nn.Identity()
        self.key_norm = nn.RMSNorm(width, config.norm_epsilon) if config.qk_norm else nn.Identity()

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """`[B, T, D] -> [B, T, D]`."""
        config = self.config
        q = self.query_norm(rearrange(self.query(x_BTD), "b t (h e) -> b h t e", h=config.heads))
        k = self.key_norm(rearrange(self.key(x_BTD), "b t (g e) -> b g t e", g=config.kv_heads))
        v = rearrange(self.value(x_BTD), "b t (g e) -> b g t e", g=config.kv_heads)
        cos, sin = rotary_angles(q.shape[2], q.shape[3], config.rope_base, q.device)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        grouped = config.kv_heads != config.heads
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        attended: torch.Tensor = self.output(rearrange(mixed, "b h t e -> b t (h e)"))
        return attended


class FeedForward(nn.Module):
    """SwiGLU (Shazeer 2020, arXiv 2002.05202)."""

    def __init__(self, config: ModelConfig, confined_to: torch.Tensor | None) -> None:
        super().__init__()
        self.gate = nn.Linear(config.dim, config.hidden, bias=False)
        self.up = nn.Linear(config.dim, config.hidden, bias=False)
        self.output = output_linear(config.hidden, config.dim, confined_to)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """`[B, T, D] -> [B, T, D]`."""
        written: torch.Tensor = self.output(F.silu(self.gate(x_BTD)) * self.up(x_BTD))
        return written


class Layer(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, config: ModelConfig, confined_to: torch.Tensor | None) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, config.norm_epsilon)
        self.attention = Attention(config, confined_to)
        self.feed_forward_norm = nn.RMSNorm(config.dim, config.norm_epsilon)
        self.feed_forward = FeedForward(config, confined_to)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """`[B, T, D] -> [B, T, D]`."""
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD))
        return x_BTD + self.feed_forward(self.feed_forward_norm(x_BTD))
