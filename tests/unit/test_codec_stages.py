"""What stands around the quantisers: rotation before them, zstd after them; and top-k, the baseline."""

from __future__ import annotations

import math
import struct
from dataclasses import replace

import pytest
import torch
import zstandard
from rounding import exact, gamma, product_error, within

from compression.codec import Codec, Rounding
from compression.errors import CodecError
from compression.registry import CodecOptions, CodecSet
from compression.rotation import ROTATIONS, RotatedCodec

pytestmark = pytest.mark.kernels


def codec(name: str, **options: object) -> Codec:
    return CodecSet(replace(CodecOptions(forward=name), **options)).forward  # type: ignore[arg-type]


def gaussian(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


# Rotation


def rotated(rotation: str, seed: int = 0) -> RotatedCodec:
    """Around a codec that loses nothing, so that only the rotation is seen."""
    return RotatedCodec(codec("float32"), rotation, seed)


def turned(rotation: str, x: torch.Tensor, seed: int = 0) -> torch.Tensor:
    return codec("float32").decode(rotated(rotation, seed).encode(x)[0], x.shape)


@pytest.mark.parametrize("rotation", ROTATIONS)
@pytest.mark.parametrize("width", [1, 2, 3, 5, 7, 8, 12, 160])
def test_a_rotation_is_orthonormal_and_undone(rotation: str, width: int) -> None:
    matrix = turned(rotation, torch.eye(width))
    # Besides a product's roundings: Hadamard's two transforms add once for each doubling of their width, then scale.
    # Each of these steps keeps the norm, so that its error is no more than u times the token's norm.
    steps = 2 * (width.bit_length() + 1)
    assert within(exact(matrix, matrix.T), torch.eye(width), product_error(matrix, matrix.T) + gamma(2 * steps))
    x = gaussian(3, 2, width)
    error = gamma(2 * steps) * x.double().norm(dim=-1, keepdim=True)
    back = rotated(rotation).decode(rotated(rotation).encode(x)[0], x.shape)
    assert within(back, x, product_error(x, matrix, matrix.T) + error)
    assert within(turned(rotation, x), exact(x, matrix), product_error(x, matrix) + error)


@pytest.mark.parametrize("rotation", ROTATIONS)
def test_every_number_is_spread(rotation: str) -> None:
    """No number of the token keeps more than a part of its energy in one place."""
    for width in (16, 24, 31, 160):
        energy = turned(rotation, torch.eye(width)).square()
        assert float(energy.amax()) < 0.8 and float((energy > 1e-6).float().mean()) > 0.4
    assert within(turned("hadamard", torch.eye(128)).abs(), 128**-0.5, gamma(2) * 128**-0.5)


@pytest.mark.parametrize("rotation", ROTATIONS)
def test_a_rotation_belongs_to_its_seed(rotation: str) -> None:
    x = gaussian(4, 12)
    assert torch.equal(turned(rotation, x, 1), turned(rotation, x, 1))
    assert not torch.equal(turned(rotation, x, 1), turned(rotation, x, 2))


@pytest.mark.parametrize("rotation", ROTATIONS)
def test_outliers_cost_less_rotated(rotation: str) -> None:
    x = gaussian(50, 128)
    x[:, 5] *= 60

    def small_numbers_lose(arm: Codec) -> float:
        missed = arm.decode(arm.encode(x)[0], x.shape) - x
        return float(missed.square().sum())

    assert small_numbers_lose(codec("int4", rotation=rotation, block=128)) < 0.7 * small_numbers_lose(
        codec("int4", block=128)
    )


@pytest.mark.parametrize("rotation", ROTATIONS)
@pytest.mark.parametrize("state", [None, Rounding(3)])
def test_what_could_overflow_is_not_rotated(rotation: str, state: Rounding | None) -> None:
    arm = codec("int2", rotation=rotation)
    limit = torch.finfo(torch.float32).max / (4 * 7)
    for x in (torch.full((2, 7), limit * 0.999), torch.full((2, 7), -limit * 0.999)):
        assert torch.isfinite(arm.decode(arm.encode(x, state)[0], x.shape)).all()
    with pytest.raises(CodecError, match=r"expected numbers of at most .* to rotate, got"):
        arm.encode(torch.full((2, 7), limit * 1.01), state)


def test_received_numbers_that_overflow_when_turned_back_are_refused() -> None:
    payload = bytes(codec("int4", scale="bfloat16").encode(torch.full((1, 64), 3e38))[0])
    with pytest.raises(CodecError, match="expected finite numbers"):
        codec("int4", scale="bfloat16", rotation="hadamard").decode(payload, (1, 64))


# zstd


@pytest.mark.parametrize("name", ["float32", "bfloat16", "int4"])
def test_zstd_loses_nothing_and_shortens_what_repeats(name: str) -> None:
    plain, packed = codec(name), codec(name, lossless="zstd")
    assert packed.lossless == plain.lossless and not packed.exact_size
    for x in (gaussian(4, 33), torch.zeros(4, 33), torch.zeros(1)):
        payload, _ = packed.encode(x)
        assert torch.equal(packed.decode(payload, x.shape), plain.decode(plain.encode(x)[0], x.shape))
    assert len(packed.encode(torch.zeros(64, 256))[0]) < plain.payload_bytes((64, 256)) / 20


@pytest.mark.parametrize("size", [1, 100, 256, 257, 5_000, 130_000, 300_000])
def test_the_bound_holds_for_what_does_not_compress(size: int) -> None:
    noise = torch.randint(-(2**31), 2**31, (size,), generator=torch.Generator().manual_seed(1), dtype=torch.int64)
    x = (noise & 0x3FFFFFFF).to(torch.int32).view(torch.float32)  # all exponents below that of infinity
    packed = codec("float32", lossless="zstd")
    payload, _ = packed.encode(x)
    assert len(payload) <= packed.payload_bytes(x.shape)
    assert torch.equal(packed.decode(payload, x.shape), x)


def hostile() -> dict[str, bytes]:
    good = bytes(codec("int4", lossless="zstd").encode(gaussian(8, 32))[0])
    silent = zstandard.ZstdCompressor(write_content_size=False)
    stating = zstandard.ZstdCompressor()
    size = codec("int4").payload_bytes((8, 32))
    stored = ((size << 3) | 1).to_bytes(3, "little") + bytes(size)  # one last block, as it is
    return {
        "nothing": b"",
        "garbage": b"\x17" * 40,
        "cut": good[:-3],
        "more behind it": good + b"\0",
        "two frames": silent.compress(bytes(size)) + silent.compress(b"x"),
        "too short inside": silent.compress(bytes(size - 1)),
        "too long inside": silent.compress(bytes(size + 1)),
        "a bomb": silent.compress(bytes(50_000_000)),
        "a bomb that says so": stating.compress(bytes(50_000_000))[:100],
        "a window of 128 MiB": b"\x28\xb5\x2f\xfd\0" + bytes([(27 - 10) << 3]) + stored,
        "a window of 2 KiB": b"\x28\xb5\x2f\xfd\0" + bytes([(11 - 10) << 3]) + stored,
        "states its size": stating.compress(bytes(size)),
        "longer than the bound": good + bytes(2000),
        "another format": struct.pack("<II", 0x184D2A50, 4) + b"skip",
    }


@pytest.mark.parametrize("what", hostile())
def test_hostile_zstd_is_refused(what: str) -> None:
    with pytest.raises(CodecError):
        codec("int4", lossless="zstd").decode(hostile()[what], (8, 32))


# Top-k


def test_topk_keeps_the_largest_and_their_places() -> None:
    x = torch.tensor([[0.5, -3.0, 2.0, 0.25, 1.0, -1.5, 0.0, 0.125]])
    for keep, kept in ((0.01, [1]), (0.25, [1, 2]), (0.5, [1, 2, 4, 5]), (1.0, list(range(8)))):
        arm = codec("topk", keep=keep)
        expected = torch.zeros_like(x)
        expected[0, kept] = x[0, kept]
        assert torch.equal(arm.decode(arm.encode(x)[0], x.shape), expected)


def test_among_equals_the_lower_place_is_kept() -> None:
    arm = codec("topk", keep=0.5)
    x = torch.tensor([[1.0, -1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0]])
    assert torch.equal(arm.decode(arm.encode(x)[0], x.shape), torch.tensor([[1.0, -1.0, 0, 0], [0.0, 0, 0, 0]]))


@pytest.mark.parametrize(
    ("width", "keep", "bits"),
    [(160, 1 / 16, 10 * 8), (128, 1 / 16, 8 * 7), (160, 1 / 4, 160), (4096, 1 / 16, 256 * 12),
     (1, 1.0, 1), (2, 0.5, 2), (3, 0.3, 2)],
)  # fmt: skip
def test_topk_counts_its_places(width: int, keep: float, bits: int) -> None:
    arm, x = codec("topk", keep=keep), gaussian(24, width)
    payload, _ = arm.encode(x)
    kept = max(1, round(keep * width))
    assert len(payload) == arm.payload_bytes(x.shape) == 24 * 2 * kept + math.ceil(24 * bits / 8)
    decoded = arm.decode(payload, x.shape)
    assert int((decoded != 0).sum()) == 24 * kept
    assert torch.equal(decoded[decoded != 0], x.bfloat16().float()[decoded != 0])


@pytest.mark.parametrize(
    ("width", "kept", "places"),
    [(160, 2, [7, 7]), (160, 2, [9, 3]), (160, 2, [5, 160]), (160, 2, [255, 255]), (7, 3, [0b1001]), (7, 3, [0b1111])],
)
def test_places_that_do_not_exist_are_refused(width: int, kept: int, places: list[int]) -> None:
    """Twice the same place, falling, beyond the end; then masks: two bits where three numbers come, four bits."""
    arm = codec("topk", keep=kept / width)
    payload = kept * struct.pack("<H", 0x3F80) + bytes(places)
    assert len(payload) == arm.payload_bytes((1, width))
    with pytest.raises(CodecError, match=f"expected {kept} rising places below {width} in each token"):
        arm.decode(payload, (1, width))
