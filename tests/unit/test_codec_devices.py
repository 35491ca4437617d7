"""The deterministic codecs make the same bytes on every device, and decode to the same bits."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from compression.codec import Rounding
from compression.registry import NAMES, CodecOptions, CodecSet

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")

VARIANTS = [
    {}, {"scale": "bfloat16"}, {"levels": "uniform"}, {"block": 5}, {"rotation": "hadamard"}, {"lossless": "zstd"},
    {"keep": 0.5},
]  # fmt: skip


def odd_numbers(width: int) -> torch.Tensor:
    """Gaussian, with zero rows, subnormals, ties and a wide range of magnitudes between tokens."""
    x = torch.randn(300, width, generator=torch.Generator().manual_seed(1))
    x *= torch.linspace(-100, 60, 300).exp2()[:, None]
    x[7], x[8], x[9] = 0, 1e-45, 1
    return x


@pytest.mark.parametrize(("name", "variant"), list(product(NAMES, VARIANTS)), ids=str)
@pytest.mark.parametrize("width", [1, 7, 160])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_bytes_and_bits(name: str, variant: dict, width: int, dtype: torch.dtype) -> None:
    codec = CodecSet(replace(CodecOptions(forward=name), **variant)).forward
    x = odd_numbers(width).to(dtype)
    payload = bytes(codec.encode(x)[0])
    assert bytes(codec.encode(x.cuda())[0]) == payload
    decoded = codec.decode(payload, x.shape, "cuda")
    assert decoded.device.type == "cuda"
    assert torch.equal(decoded.cpu().view(torch.int32), codec.decode(payload, x.shape).view(torch.int32))


@pytest.mark.parametrize("name", NAMES)
def test_stochastic_rounding_on_the_device(name: str) -> None:
    codec = CodecSet(CodecOptions(forward=name)).forward
    x = torch.randn(20_000, 8, generator=torch.Generator().manual_seed(2)).cuda()
    payload, _ = codec.encode(x, Rounding(5))
    assert bytes(codec.encode(x, Rounding(5))[0]) == bytes(payload)
    if name.startswith("int"):
        off = codec.decode(payload, x.shape, "cuda") - x
        assert abs(float(off.mean())) < 5 * float(off.std()) / x.numel() ** 0.5
