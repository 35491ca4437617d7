"""Properties of all codecs: what is declared is sent, what is sent comes back, what cannot be is refused."""

from __future__ import annotations

import math
import struct
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from compression.codec import Codec, Rounding, wire_round_trip
from compression.errors import CodecError
from compression.registry import NAMES, CodecOptions, CodecSet
from compression.token_ids import decode_ids, encode_ids, id_bytes

pytestmark = pytest.mark.kernels

# What lies between this and float32's largest would round to a bfloat16 infinity.
LARGEST = float(torch.finfo(torch.bfloat16).max)
FLOATS = st.floats(-LARGEST, LARGEST, width=32)
SHAPES = array_shapes(min_dims=1, max_dims=4, min_side=1, max_side=7)
TENSORS = SHAPES.flatmap(lambda shape: arrays(np.float32, shape, elements=FLOATS))
# What a rotation takes too.
MODEST = SHAPES.flatmap(lambda shape: arrays(np.float32, shape, elements=st.floats(-(2.0**100), 2.0**100, width=32)))
OPTIONS = st.builds(
    CodecOptions,
    forward=st.sampled_from(NAMES),
    block=st.sampled_from([1, 2, 3, 5, 64]),
    scale=st.sampled_from(["bfloat16", "float8"]),
    levels=st.sampled_from(["uniform", "normal"]),
    rotation=st.sampled_from(["none", "hadamard", "orthogonal"]),
    lossless=st.sampled_from(["none", "zstd"]),
    keep=st.sampled_from([0.01, 0.25, 1.0]),
    seed=st.integers(0, 3),
)
STATES = st.one_of(st.none(), st.builds(Rounding, st.integers(0, 2**63 - 1)))
on_a_busy_machine = settings(deadline=None, max_examples=60)


def codec(name: str = "int4", **options: object) -> Codec:
    return CodecSet(replace(CodecOptions(forward=name), **options)).forward  # type: ignore[arg-type]


def bits(x: torch.Tensor) -> list[int]:
    return x.contiguous().view(torch.int32).flatten().tolist()


def rounded(value: float) -> float:
    """`value` to the nearest bfloat16, ties to even, by the bits of its float32."""
    (word,) = struct.unpack("<I", struct.pack("<f", value))
    word = (word + 0x7FFF + ((word >> 16) & 1)) & 0xFFFF0000
    return struct.unpack("<f", struct.pack("<I", word))[0]


# Casts


@on_a_busy_machine
@given(TENSORS)
def test_float32_comes_back_to_the_bit(values: np.ndarray) -> None:
    x = torch.from_numpy(values)
    payload, state = codec("float32").encode(x)
    assert bytes(payload) == values.astype("<f4").tobytes() and state is None
    assert bits(codec("float32").decode(payload, x.shape)) == bits(x)


@on_a_busy_machine
@given(TENSORS)
def test_bfloat16_rounds_to_nearest_even(values: np.ndarray) -> None:
    x = torch.from_numpy(values)
    payload, _ = codec("bfloat16").encode(x)
    decoded = codec("bfloat16").decode(payload, x.shape)
    assert bits(decoded) == bits(x.to(torch.bfloat16).float())
    assert decoded.flatten().tolist() == [rounded(value) for value in values.flatten().tolist()]
    assert bytes(payload) == b"".join(struct.pack("<f", v)[2:] for v in decoded.flatten().tolist())


@on_a_busy_machine
@given(TENSORS)
def test_bfloat16_loses_nothing_the_second_time(values: np.ndarray) -> None:
    once = codec("bfloat16").decode(codec("bfloat16").encode(torch.from_numpy(values))[0], values.shape)
    assert bytes(codec("bfloat16").encode(once)[0]) == bytes(codec("bfloat16").encode(torch.from_numpy(values))[0])


# All


@on_a_busy_machine
@given(MODEST, OPTIONS, STATES, st.sampled_from([torch.float32, torch.bfloat16]))
def test_the_declared_size_is_the_real_one(
    values: np.ndarray, options: CodecOptions, state: Rounding | None, dtype: torch.dtype
) -> None:
    codec = CodecSet(options).forward
    payload, _ = codec.encode(torch.from_numpy(values).to(dtype), state)
    declared = codec.payload_bytes(values.shape)
    assert len(payload) == declared if codec.exact_size else len(payload) <= declared
    assert codec.exact_size == (options.lossless == "none")
    decoded = codec.decode(payload, values.shape)
    assert decoded.dtype == torch.float32 and decoded.shape == values.shape and torch.isfinite(decoded).all()


@on_a_busy_machine
@given(MODEST, OPTIONS)
def test_a_function_of_its_input(values: np.ndarray, options: CodecOptions) -> None:
    """Also of a view in another memory layout, and of a second set of the same options."""
    x = torch.from_numpy(values)
    turned = torch.stack((x, -x)).permute(*reversed(range(x.dim() + 1)))
    first, second = CodecSet(options).forward, CodecSet(options).forward
    assert bytes(first.encode(turned)[0]) == bytes(second.encode(turned.contiguous())[0])


@on_a_busy_machine
@given(MODEST, OPTIONS, STATES, st.data(), st.sampled_from([math.nan, math.inf, -math.inf]))
def test_a_number_that_is_not_finite_is_refused(
    values: np.ndarray, options: CodecOptions, state: Rounding | None, data: st.DataObject, bad: float
) -> None:
    x = torch.from_numpy(values.copy())
    x.view(-1)[data.draw(st.integers(0, x.numel() - 1))] = bad
    with pytest.raises(CodecError, match="expected finite numbers"):
        CodecSet(options).forward.encode(x, state)


@on_a_busy_machine
@given(MODEST, OPTIONS, st.data())
def test_a_payload_of_another_length_is_refused(values: np.ndarray, options: CodecOptions, data: st.DataObject) -> None:
    codec = CodecSet(replace(options, lossless="none")).forward
    whole = bytes(codec.encode(torch.from_numpy(values))[0])
    cut = data.draw(st.integers(0, len(whole) - 1))
    for payload in (whole[:cut], whole + bytes(1 + cut)):
        with pytest.raises(CodecError, match=f"expected {len(whole)} bytes .* got {len(payload)}"):
            codec.decode(payload, values.shape)


@on_a_busy_machine
@given(SHAPES, OPTIONS, st.data())
def test_any_bytes_decode_or_are_refused(shape: tuple[int, ...], options: CodecOptions, data: st.DataObject) -> None:
    codec = CodecSet(options).forward
    size = codec.payload_bytes(shape)
    payload = data.draw(st.binary(min_size=size if codec.exact_size else 0, max_size=size))
    try:
        decoded = codec.decode(payload, shape)
    except CodecError:
        return
    assert decoded.shape == shape and torch.isfinite(decoded).all()


@on_a_busy_machine
@given(MODEST, OPTIONS)
def test_what_is_decoded_has_its_own_memory(values: np.ndarray, options: CodecOptions) -> None:
    codec = CodecSet(options).forward
    payload = bytearray(codec.encode(torch.from_numpy(values))[0])
    decoded = codec.decode(memoryview(payload), values.shape)
    before = bits(decoded)
    payload[:] = bytes(len(payload))
    assert bits(decoded) == before


@on_a_busy_machine
@given(MODEST, OPTIONS, st.sampled_from(NAMES), STATES)
def test_the_round_trip_is_what_the_wire_does(
    values: np.ndarray, options: CodecOptions, gradient: str, state: Rounding | None
) -> None:
    codecs = CodecSet(replace(options, gradient=gradient))
    c = torch.from_numpy(values.copy()).requires_grad_()
    through = wire_round_trip(c, codecs.forward, codecs.gradient, state)
    through.backward(c.detach() / 3)
    assert bits(through.detach()) == bits(codecs.forward.decode(codecs.forward.encode(c)[0], c.shape))
    sent, _ = codecs.gradient.encode(c.detach() / 3, state)
    assert c.grad is not None and bits(c.grad) == bits(codecs.gradient.decode(sent, c.shape))


# Tags and ids


@on_a_busy_machine
@given(st.integers(0, 255), OPTIONS)
def test_tags_name_codecs(tag: int, options: CodecOptions) -> None:
    codecs = CodecSet(options)
    if tag & 0x7F in (1, 2, 3, 18, 19, 20, 22, 24):
        assert codecs.by_tag(tag).tag == tag
    else:
        with pytest.raises(CodecError, match=f"expected a codec tag in .*, got {tag}"):
            codecs.by_tag(tag)


def test_tags_and_names_are_pinned() -> None:
    """They are the wire's: a change here needs a new protocol version."""
    assert {(c := codec(name)).name: (c.tag, c.lossless) for name in NAMES} == {
        "float32": (1, True),
        "bfloat16": (2, False),
        "topk": (3, False),
        "int2": (18, False),
        "int3": (19, False),
        "int4": (20, False),
        "int6": (22, False),
        "int8": (24, False),
    }
    assert {(c := codec(name, lossless="zstd")).name: c.tag for name in ("float32", "int4")} == {
        "float32+zstd": 129,
        "int4+zstd": 148,
    }


@on_a_busy_machine
@given(st.integers(1, 2**32), SHAPES, st.data())
def test_ids_of_any_vocabulary_come_back(vocab: int, shape: tuple[int, ...], data: st.DataObject) -> None:
    ids = data.draw(arrays(np.int64, shape, elements=st.integers(0, vocab - 1)))
    payload = encode_ids(ids, vocab)
    assert len(payload) == ids.size * id_bytes(vocab) and 256 ** (id_bytes(vocab) - 1) < max(2, vocab)
    assert np.array_equal(decode_ids(payload, shape, vocab), ids)
