"""The model's layers. Each reads the residual stream through `read` and writes into it as it is held.

The stream is held either in the model's d numbers a token or, where all that is written must lie in span(U), in its k
coordinates (see `protocol.model.stage`). Only the width of the matrices that write depends on it.

Shape suffixes: B batch, T time, D model width, W width of the held stream (D or K), H query heads, G key/value heads,
E width per head.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import nn

from protocol.config import ModelConfig


def rotary_angles(length: int, width: int, base: float, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines `[T, E / 2]` of the rotary positions (Su et al. 2021, arXiv 2104.09864, section 3.2)."""
    frequencies = base ** (-torch.arange(0, width, 2, dtype=torch.float32, device=device) / width)
    angles = torch.arange(length, dtype=torch.float32, device=device)[:, None] * frequencies
    return angles.cos(), angles.sin()


def rotate(x_BHTE: torch.Tensor, cos_TE: torch.Tensor, sin_TE: torch.Tensor) -> torch.Tensor:
    """Turn each pair (first half, second half) of the head's numbers by its position's angle."""
    # In bfloat16 the angles of late positions would be too coarse.
    first, second = x_BHTE.to(torch.promote_types(x_BHTE.dtype, torch.float32)).chunk(2, dim=-1)
    turned = torch.cat((first * cos_TE - second * sin_TE, first * sin_TE + second * cos_TE), dim=-1)
    return turned.to(x_BHTE.dtype)


class Attention(nn.Module):
    """Grouped-query attention; in a decoder causal, with rotary positions."""

    def __init__(self, config: ModelConfig, written: int) -> None:
        super().__init__()
        self.config = config
        width = config.dim // config.heads
        self.query = nn.Linear(config.dim, config.heads * width, bias=False)
        self.key = nn.Linear(config.dim, config.kv_heads * width, bias=False)
        self.value = nn.Linear(config.dim, config.kv_heads * width, bias=False)
        self.output = nn.Linear(config.heads * width, written, bias=False)
        self.query_norm = nn.RMSNorm(width, config.norm_epsilon) if config.qk_norm else nn.Identity()
        self.key_norm = nn.RMSNorm(width, config.norm_epsilon) if config.qk_norm else nn.Identity()

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """`[B, T, D] -> [B, T, W]`."""
        config = self.config
        q = self.query_norm(rearrange(self.query(x_BTD), "b t (h e) -> b h t e", h=config.heads))
        k = self.key_norm(rearrange(self.key(x_BTD), "b t (g e) -> b g t e", g=config.kv_heads))
        v = rearrange(self.value(x_BTD), "b t (g e) -> b g t e", g=config.kv_heads)
        if config.causal:
            cos, sin = rotary_angles(q.shape[2], q.shape[3], config.rope_base, q.device)
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        grouped = config.kv_heads != config.heads
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=config.causal, enable_gqa=grouped)
        attended: torch.Tensor = self.output(rearrange(mixed, "b h t e -> b t (h e)"))
        return attended


class FeedForward(nn.Module):
    """SwiGLU (Shazeer 2020, arXiv 2002.05202)."""

    def __init__(self, config: ModelConfig, written: int) -> None:
        super().__init__()
        self.gate = nn.Linear(config.dim, config.hidden, bias=False)
        self.up = nn.Linear(config.dim, config.hidden, bias=False)
        self.output = nn.Linear(config.hidden, written, bias=False)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """`[B, T, D] -> [B, T, W]`."""
        written: torch.Tensor = self.output(F.silu(self.gate(x_BTD)) * self.up(x_BTD))
        return written


class Layer(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, config: ModelConfig, written: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, config.norm_epsilon)
        self.attention = Attention(config, written)
        self.feed_forward_norm = nn.RMSNorm(config.dim, config.norm_epsilon)
        self.feed_forward = FeedForward(config, written)

    def forward(self, stream_BTW: torch.Tensor, read: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """The stream after this layer. `read` gives the D numbers a token that the stream stands for."""
        stream_BTW = stream_BTW + self.attention(self.attention_norm(read(stream_BTW)))
        written: torch.Tensor = self.feed_forward(self.feed_forward_norm(read(stream_BTW)))
        return stream_BTW + written
