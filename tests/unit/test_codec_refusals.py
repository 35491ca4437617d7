"""What a codec must refuse, and what it must not trip over."""

import struct

import pytest
import torch

from compression.codec import Codec
from compression.errors import CodecError
from compression.registry import NAMES, CodecOptions, CodecSet


def codec(name: str) -> Codec:
    return CodecSet(CodecOptions(forward=name)).forward


@pytest.mark.parametrize("name", NAMES)
def test_last_axis_of_one_with_another_stride(name: str) -> None:
    """[2, 1] with strides (1, 2) counts as contiguous, but `view(uint8)` wants a last stride of 1."""
    x = torch.tensor([[1.0, 2.0]]).T  # shape [2, 1]
    assert torch.equal(codec(name).decode(codec(name).encode(x)[0], (2, 1)), x)


def test_a_finite_number_that_rounds_to_infinity_is_refused() -> None:
    """3.4e38 is finite in float32, its bfloat16 is inf."""
    with pytest.raises(CodecError):
        codec("bfloat16").encode(torch.tensor([3.4e38]))


@pytest.mark.parametrize(("name", "nan"), [("float32", struct.pack("<f", float("nan"))), ("bfloat16", b"\xc0\x7f")])
def test_a_received_nan_is_refused(name: str, nan: bytes) -> None:
    """A peer's NaN must be told as that peer's (RemoteError), not as ours (RunFailed at our next encode)."""
    with pytest.raises(CodecError):
        codec(name).decode(nan, (1,))
