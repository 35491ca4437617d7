"""Quantisers: their levels, scales and blocks, what they lose, and that stochastic rounding has no bias."""

from __future__ import annotations

import math
import struct
from dataclasses import replace
from itertools import pairwise, product

import pytest
import torch
from rounding import gamma, within

from compression import quantise
from compression.codec import Codec, Rounding
from compression.errors import CodecError
from compression.levels import LLOYD_MAX, NormalLevels, UniformLevels
from compression.registry import QUANTISED, CodecOptions, CodecSet
from compression.scales import SCALE_FORMATS

pytestmark = pytest.mark.kernels

CPU = torch.device("cpu")
ARMS = list(product(QUANTISED, ["uniform", "normal"], ["bfloat16", "float8"]))


def codec(name: str, **options: object) -> Codec:
    return CodecSet(replace(CodecOptions(forward=name), **options)).forward  # type: ignore[arg-type]


def through(codec: Codec, x: torch.Tensor, state: Rounding | None = None) -> torch.Tensor:
    return codec.decode(codec.encode(x, state)[0], x.shape)


def loss(codec: Codec, x: torch.Tensor, state: Rounding | None = None) -> float:
    """Relative squared error."""
    return float((through(codec, x, state) - x).square().sum() / x.square().sum())


# Levels


def lloyd_max(bits: int) -> list[float]:
    """The fixed point of: thresholds half-way between levels, levels the means between thresholds; N(0, 1)."""

    def density(t: float) -> float:
        return math.exp(-t * t / 2) / math.sqrt(2 * math.pi)

    def below(t: float) -> float:
        return (1 + math.erf(t / math.sqrt(2))) / 2

    half = 2 ** (bits - 1)
    levels = [(i + 0.5) * 2.5 / half for i in range(half)]
    for _ in range(5000):
        edges = [0.0, *((a + b) / 2 for a, b in pairwise(levels)), 40.0]
        levels = [(density(a) - density(b)) / (below(b) - below(a)) for a, b in pairwise(edges)]
    return levels


@pytest.mark.parametrize("bits", LLOYD_MAX)
def test_the_normal_levels_are_lloyd_max(bits: int) -> None:
    assert LLOYD_MAX[bits] == pytest.approx(lloyd_max(bits), abs=1e-7)


def test_uniform_levels() -> None:
    assert within(UniformLevels(2).values(CPU), torch.tensor([-1, -1 / 3, 1 / 3, 1]), gamma(2))
    for bits, count in ((2, 4), (3, 8), (4, 16), (6, 63), (8, 255)):
        values = UniformLevels(bits).values(CPU)
        assert len(values) == count and values[0] == -1 and values[-1] == 1
        assert within(values.double().diff(), 2 / (count - 1), 2 * gamma(1))  # two levels, each rounded, of at most 1
        assert bool((values == 0).any()) == (bits > 4)


@pytest.mark.parametrize("levels", [*map(UniformLevels, (2, 3, 4, 6, 8)), *map(NormalLevels, (2, 3, 4))])
def test_the_nearest_level(levels: UniformLevels | NormalLevels) -> None:
    y, values = torch.linspace(-1.5, 1.5, 10_001), levels.values(CPU)
    away = (y[:, None] - values).abs()
    chosen = away.gather(1, levels.nearest(y).to(torch.int64)[:, None])[:, 0]
    assert float((chosen - away.amin(1)).max()) <= 2 / 4096
    assert torch.equal(levels.nearest(values).to(torch.int64), torch.arange(len(values)))
    assert torch.equal(levels.snap(y), levels.value(levels.nearest(y)))


# Scales


@pytest.mark.parametrize("name", SCALE_FORMATS)
def test_scales_round_up_and_to_nearest(name: str) -> None:
    form = SCALE_FORMATS[name]
    scales = torch.rand(5000, generator=torch.Generator().manual_seed(1)).mul(29).sub(20).exp2()
    unit = form.unit(scales)
    nearest, up = (form.value(form.round(scales, unit, up=up), unit) for up in (False, True))
    step = {"bfloat16": 2**-7, "float8": 2**-3}[name]
    assert ((nearest - scales).abs() <= scales * step / 2).all() and (nearest < scales).any()
    assert (up >= scales).all() and (up <= scales * (1 + step)).all()
    raw = torch.cat(form.write(form.round(scales, unit, up=True), unit))
    assert len(raw) == form.stored_bytes(5000) and torch.equal(form.read(raw), up)


def test_the_unit_of_float8_scales_moves_no_mantissa() -> None:
    form = SCALE_FORMATS["float8"]
    for largest in (1e-45, 1e-38, 0.3, 448.0, 449.0, 3.4e38):
        unit = form.unit(torch.tensor([largest, 0.0]))
        assert math.frexp(float(unit))[0] == 0.5 and largest / float(unit) < 2


@pytest.mark.parametrize("up", [False, True])
@pytest.mark.parametrize("exponent", [-126, -100, -5, 0, 90])
def test_float8_scales_have_three_bits_of_mantissa_over_thirty_powers_of_two(exponent: int, up: bool) -> None:
    """They are those that e4m3, which has a sign and half the powers, keeps beside a much smaller largest scale."""
    form, unit = SCALE_FORMATS["float8"], torch.tensor(2.0**exponent)
    scales = torch.rand(4000, generator=torch.Generator().manual_seed(1)) + 1  # one power of two after another
    expected = scales.to(torch.float8_e4m3fn).to(torch.float32)
    expected += 2.0**-3 * (expected < scales) * up
    for power in range(0, -30, -1):
        if exponent + power >= -126:
            rounded = form.value(form.round(scales * unit * 2.0**power, unit, up), unit)
            assert torch.equal(rounded, expected * unit * 2.0**power), power


def test_every_byte_of_a_float8_scale_is_a_number_and_they_are_in_order() -> None:
    form, raw = SCALE_FORMATS["float8"], torch.arange(256, dtype=torch.uint8)
    one = torch.tensor([1.0]).view(torch.uint8)
    scales = form.read(torch.cat([one, raw]))
    assert torch.isfinite(scales).all() and (scales.diff() > 0).all()
    assert [float(scales[byte]) for byte in (0, 1, 240, 255)] == [0.0, 1.125 * 2**-30, 1.0, 3.75]
    assert torch.equal(form.round(scales, torch.tensor(1.0), up=False), raw.to(torch.int32))


@pytest.mark.parametrize(
    ("scale", "stored"),
    [("bfloat16", b"\xc0\x7f"), ("bfloat16", b"\x80\x7f"), ("bfloat16", b"\x80\xbf"), ("float8", b"\0\0\x80\xbf\xf0"),
     ("float8", b"\0\0\xc0\x7f\xf0"), ("float8", b"\0\0\x80\xff\xf0"), ("float8", b"\0\0\x80\x7f\0"),
     ("float8", b"\0\0\x00\x7f\xf8")],
)  # fmt: skip
def test_a_scale_that_is_none_is_refused(scale: str, stored: bytes) -> None:
    """NaN, infinity, negative; the same by way of the unit, whose largest power cannot be doubled."""
    with pytest.raises(CodecError, match="expected finite scales of at least 0"):
        codec("int4", scale=scale).decode(stored + b"\x08", (1,))


# Payloads


@pytest.mark.parametrize(
    ("width", "block", "scales"),
    [(1, 64, 1), (5, 64, 1), (64, 64, 1), (65, 64, 2), (160, 64, 3), (10, 4, 3), (7, 1, 7)],
)
def test_declared_sizes_by_hand(width: int, block: int, scales: int) -> None:
    for name, bits in QUANTISED.items():
        planes = {3: (1, 2), 6: (2, 4)}.get(bits, (bits,))
        codes = sum(math.ceil(6 * width * plane / 8) for plane in planes)
        for scale, stored in (("bfloat16", 2 * 6 * scales), ("float8", 4 + 6 * scales)):
            assert codec(name, block=block, scale=scale).payload_bytes((2, 3, width)) == stored + codes


def test_a_payload_by_hand_decodes_to_the_bit() -> None:
    """Two tokens of three numbers in blocks of two: scales 2, 0.5 | 1, 0; codes 0..3, 3, 0 of int2, in four rows."""
    codes = [0, 1, 2, 3, 3, 0]
    rows = [codes[0:2], codes[2:4], codes[4:6], [0, 0]]
    packed = bytes(sum(rows[row][column] << 2 * row for row in range(4)) for column in range(2))
    scales = b"".join(struct.pack("<f", scale)[2:] for scale in (2.0, 0.5, 1.0, 0.0))
    decoded = codec("int2", block=2, scale="bfloat16", levels="uniform").decode(scales + packed, (2, 3))
    third = float(torch.tensor(1 / 3))
    assert decoded.tolist() == [[-2.0, -2 * third, 0.5 * third], [1.0, 1.0, -0.0]]
    unit = struct.pack("<f", 0.25) + bytes([0xF8, 0xE8, 0xF0, 0])  # 2, 0.5, 1 and 0
    assert torch.equal(
        codec("int2", block=2, scale="float8", levels="uniform").decode(unit + packed, (2, 3)),
        decoded * 0.25,
    )


@pytest.mark.parametrize("name", QUANTISED)
def test_the_last_block_may_be_shorter(name: str) -> None:
    """A block of zeros beside a large one stays exact, at every width."""
    for width in range(1, 14):
        x = torch.zeros(3, width)
        x[:, -1] = 1.0
        assert torch.equal(through(codec(name, block=1, scale="bfloat16"), x), x)
        blocks = -(-width // 4)
        first = through(codec(name, block=4), x)[:, : (blocks - 1) * -(-width // blocks)]
        assert torch.equal(first, torch.zeros_like(first))


def test_pieces_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(40, 160, generator=torch.Generator().manual_seed(1))
    for name in QUANTISED:
        whole = bytes(codec(name).encode(x)[0])
        monkeypatch.setattr(quantise, "_AT_ONCE", 700)
        assert bytes(codec(name).encode(x)[0]) == whole
        monkeypatch.undo()


@pytest.mark.parametrize(("name", "levels", "scale"), ARMS)
def test_a_token_does_not_depend_on_others(name: str, levels: str, scale: str) -> None:
    """The model is causal: what a token becomes must not tell of later ones."""
    arm = codec(name, levels=levels, scale=scale)
    x = torch.randn(1, 6, 20, generator=torch.Generator().manual_seed(2))
    for factor in (1e-6, 100.0, 1e6):
        louder = x.clone()
        louder[:, 3:] *= factor
        assert torch.equal(through(arm, x)[:, :3], through(arm, louder)[:, :3]), factor


# What is lost

# Relative squared error on Gaussian numbers in blocks of 54: measured, and room for 5 % more.
GAUSSIAN = {
    ("int2", "normal"): 0.111, ("int3", "normal"): 0.029, ("int4", "normal"): 0.0071,
    ("int2", "uniform"): 0.113, ("int3", "uniform"): 0.033, ("int4", "uniform"): 0.0087,
    ("int6", "uniform"): 0.00057, ("int8", "uniform"): 0.000035,
}  # fmt: skip


@pytest.mark.parametrize(("name", "levels"), GAUSSIAN)
def test_what_gaussian_numbers_lose(name: str, levels: str) -> None:
    x = torch.randn(500, 160, generator=torch.Generator().manual_seed(3))
    for scale, factor in (("bfloat16", 1.05), ("float8", 1.05 if name in ("int2", "int3", "int4") else 1.25)):
        assert loss(codec(name, levels=levels, scale=scale), x) < factor * GAUSSIAN[name, levels], scale


def test_clipping_is_chosen_block_by_block() -> None:
    """The largest number alone as scale, and the root mean square that Lloyd-Max assumes, both lose more."""
    x = torch.randn(1000, 64, generator=torch.Generator().manual_seed(4))
    levels = NormalLevels(4)

    def with_scale(scale: torch.Tensor) -> float:
        return float((levels.snap(x / scale) * scale - x).square().sum() / x.square().sum())

    largest = x.abs().amax(1, keepdim=True)
    deviation = x.square().mean(1, keepdim=True).sqrt() * LLOYD_MAX[4][-1]
    ours = loss(codec("int4", scale="bfloat16"), x)
    assert ours < 0.95 * with_scale(largest) < 0.95 * with_scale(deviation)


@pytest.mark.parametrize("name", QUANTISED)
def test_the_smallest_scale_is_better_than_none(name: str) -> None:
    """9/8 2^-30 is the smallest float8 scale beside a 1; 0.6 of it rounds to it, less than half of it to 0."""
    smallest = 1.125 * 2**-30
    x = torch.tensor([[1.0] * 8, [0.6 * smallest] * 8, [0.4 * smallest] * 8])
    decoded = through(codec(name), x)
    assert torch.equal(decoded[0], x[0]) and (decoded[1] > 0).all()
    assert (decoded[2] > 0).all() if name in ("int6", "int8") else torch.equal(decoded[2], torch.zeros(8))


@pytest.mark.parametrize(("name", "levels", "scale"), ARMS)
def test_odd_magnitudes(name: str, levels: str, scale: str) -> None:
    arm = codec(name, levels=levels, scale=scale, block=4)
    tiny, huge = 1e-45, 3.4028234e38
    rows = [
        [0.0] * 4,
        [tiny, -tiny, 0.0, tiny],
        [huge, -huge, huge, 1.0],
        [huge, tiny, -1.0, 0.0],
        [1e-30, -1e30, 1, 0],
    ]
    for state in (None, Rounding(7)):
        for x in (torch.tensor(rows), *torch.tensor(rows)):
            decoded = through(arm, x, state)
            assert torch.isfinite(decoded).all()
            assert (decoded.abs() <= 1.13 * x.abs().amax() + 1e-40).all()
        assert torch.equal(through(arm, torch.tensor(rows), state)[0], torch.zeros(4))
        assert through(arm, torch.tensor([huge]), state).item() == pytest.approx(huge, rel=0.07)


# Stochastic rounding


@pytest.mark.parametrize(("name", "levels", "scale"), ARMS)
def test_stochastic_rounding_has_no_bias(name: str, levels: str, scale: str) -> None:
    """The mean of n draws is off by less than 5 of its own deviations, which it exceeds once in 1.7 million times."""
    draws, width = 20_000, 24
    row = torch.randn(width, generator=torch.Generator().manual_seed(5))
    row[:3] = torch.tensor([0.0, 5.0, -1e-3])
    decoded = through(codec(name, levels=levels, scale=scale), row.expand(draws, width), Rounding(11)).double()
    assert all(1 <= len(column.unique()) <= 2 for column in decoded.T)
    off, spread = (decoded.mean(0) - row).abs(), decoded.std(0) / math.sqrt(draws)
    assert (off <= 5 * spread + 1e-6 * row.abs()).all(), (off / spread).max()
    # Rounding to nearest would fail this: it is off by much more than its own deviation, which is 0.
    nearest = through(codec(name, levels=levels, scale=scale), row.expand(2, width))[0]
    assert ((nearest - row).abs() > 5 * spread + 1e-6 * row.abs()).any()


def test_small_blocks_keep_their_mean_beside_large_ones() -> None:
    """A float8 scale far below the largest would be 0 by rounding to nearest."""
    x = torch.tensor([[1e-10, 3e-11], [1.0, 1.0]]).repeat(50_000, 1)
    decoded = through(codec("int4", scale="float8"), x, Rounding(3)).double().view(-1, 2, 2)
    off, spread = (decoded.mean(0)[0] - x[0]).abs(), decoded.std(0)[0] / math.sqrt(50_000)
    assert (spread > 0).all() and (off <= 5 * spread).all()
    assert torch.equal(through(codec("int4", scale="float8"), x)[0], torch.zeros(2))


def test_rounding_is_a_function_of_its_state() -> None:
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(6))
    arm = codec("int4")
    before = torch.random.get_rng_state()
    first, after = arm.encode(x, Rounding(1))
    again, _ = arm.encode(x, Rounding(1))
    assert after == Rounding(1).next() != Rounding(1) and bytes(first) == bytes(again)
    assert bytes(arm.encode(x, after)[0]) != bytes(first) != bytes(arm.encode(x, Rounding(2))[0])
    assert arm.encode(x)[1] is None
    assert torch.equal(torch.random.get_rng_state(), before), "the process-wide generator was used"
