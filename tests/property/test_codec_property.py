"""Properties of the codecs: what is declared is sent, what is sent comes back, what cannot be is refused."""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from compression.codec import CODECS, codec_by_tag, wire_round_trip
from compression.errors import CodecError
from compression.token_ids import decode_ids, encode_ids, id_bytes

# What lies between this and float32's largest would round to a bfloat16 infinity.
LARGEST = float(torch.finfo(torch.bfloat16).max)
FLOATS = st.floats(-LARGEST, LARGEST, width=32)
SHAPES = array_shapes(min_dims=1, max_dims=4, min_side=1, max_side=7)
TENSORS = SHAPES.flatmap(lambda shape: arrays(np.float32, shape, elements=FLOATS))
NAMES = st.sampled_from(sorted(CODECS))
on_a_busy_machine = settings(deadline=None, max_examples=60)


def bits(x: torch.Tensor) -> list[int]:
    return x.contiguous().view(torch.int32).flatten().tolist()


def rounded(value: float) -> float:
    """`value` to the nearest bfloat16, ties to even, by the bits of its float32."""
    (word,) = struct.unpack("<I", struct.pack("<f", value))
    word = (word + 0x7FFF + ((word >> 16) & 1)) & 0xFFFF0000
    return struct.unpack("<f", struct.pack("<I", word))[0]


@on_a_busy_machine
@given(TENSORS)
def test_float32_comes_back_to_the_bit(values: np.ndarray) -> None:
    x = torch.from_numpy(values)
    payload, state = CODECS["float32"].encode(x)
    assert bytes(payload) == values.astype("<f4").tobytes() and state is None
    assert bits(CODECS["float32"].decode(payload, x.shape)) == bits(x)


@on_a_busy_machine
@given(TENSORS)
def test_bfloat16_rounds_to_nearest_even(values: np.ndarray) -> None:
    x = torch.from_numpy(values)
    payload, _ = CODECS["bfloat16"].encode(x)
    decoded = CODECS["bfloat16"].decode(payload, x.shape)
    assert bits(decoded) == bits(x.to(torch.bfloat16).float())
    assert decoded.flatten().tolist() == [rounded(value) for value in values.flatten().tolist()]
    assert bytes(payload) == b"".join(struct.pack("<f", v)[2:] for v in decoded.flatten().tolist())


@on_a_busy_machine
@given(TENSORS)
def test_bfloat16_loses_nothing_the_second_time(values: np.ndarray) -> None:
    codec = CODECS["bfloat16"]
    once = codec.decode(codec.encode(torch.from_numpy(values))[0], values.shape)
    assert bytes(codec.encode(once)[0]) == bytes(codec.encode(torch.from_numpy(values))[0])


@on_a_busy_machine
@given(TENSORS, NAMES)
def test_the_declared_size_is_the_real_one(values: np.ndarray, name: str) -> None:
    payload, _ = CODECS[name].encode(torch.from_numpy(values))
    assert len(payload) == CODECS[name].payload_bytes(values.shape)
    assert len(payload) == math.prod(values.shape) * {"float32": 4, "bfloat16": 2}[name]


@on_a_busy_machine
@given(st.integers(1, 5), st.integers(1, 40), NAMES)
def test_one_coordinate_a_token(batch: int, length: int, name: str) -> None:
    x_BTK = torch.arange(batch * length).float().reshape(batch, length, 1) % 256
    payload, _ = CODECS[name].encode(x_BTK)
    assert torch.equal(CODECS[name].decode(payload, (batch, length, 1)), x_BTK)


@on_a_busy_machine
@given(TENSORS, NAMES)
def test_memory_layout_does_not_matter(values: np.ndarray, name: str) -> None:
    x = torch.from_numpy(values)
    turned = torch.stack((x, -x)).permute(*reversed(range(x.dim() + 1)))
    assert bytes(CODECS[name].encode(turned)[0]) == bytes(CODECS[name].encode(turned.contiguous())[0])


@on_a_busy_machine
@given(TENSORS, NAMES, st.data(), st.sampled_from([math.nan, math.inf, -math.inf]))
def test_a_number_that_is_not_finite_is_refused(values: np.ndarray, name: str, data: st.DataObject, bad: float) -> None:
    x = torch.from_numpy(values.copy())
    x.view(-1)[data.draw(st.integers(0, x.numel() - 1))] = bad
    with pytest.raises(CodecError, match="expected finite numbers"):
        CODECS[name].encode(x)


@on_a_busy_machine
@given(TENSORS, NAMES, st.data())
def test_a_payload_of_another_length_is_refused(values: np.ndarray, name: str, data: st.DataObject) -> None:
    codec = CODECS[name]
    whole = bytes(codec.encode(torch.from_numpy(values))[0])
    cut = data.draw(st.integers(0, len(whole) - 1))
    for payload in (whole[:cut], whole + bytes(1 + cut)):
        with pytest.raises(CodecError, match=f"expected {len(whole)} bytes .* got {len(payload)}"):
            codec.decode(payload, values.shape)


@on_a_busy_machine
@given(TENSORS, NAMES)
def test_what_is_decoded_has_its_own_memory(values: np.ndarray, name: str) -> None:
    codec = CODECS[name]
    payload = bytearray(codec.encode(torch.from_numpy(values))[0])
    decoded = codec.decode(memoryview(payload), values.shape)
    before = bits(decoded)
    payload[:] = bytes(len(payload))
    assert bits(decoded) == before and decoded.dtype == torch.float32 and decoded.shape == values.shape


@on_a_busy_machine
@given(TENSORS, NAMES)
def test_the_wire_rounds_values_and_gradients_alike(values: np.ndarray, name: str) -> None:
    c = torch.from_numpy(values.copy()).requires_grad_()
    through = wire_round_trip(c, CODECS[name])
    through.backward(torch.from_numpy(values))
    assert c.grad is not None and bits(c.grad) == bits(through.detach())
    assert bits(through.detach()) == bits(CODECS[name].decode(CODECS[name].encode(c)[0], c.shape))


@on_a_busy_machine
@given(st.integers(0, 255))
def test_tags_name_codecs(tag: int) -> None:
    known = {codec.tag: codec for codec in CODECS.values()}
    if tag in known:
        assert codec_by_tag(tag) is known[tag]
    else:
        with pytest.raises(CodecError, match=f"expected a codec tag in .*, got {tag}"):
            codec_by_tag(tag)


def test_tags_and_names_are_pinned() -> None:
    """They are the wire's: a change here needs a new protocol version."""
    assert {codec.name: (codec.tag, codec.lossless) for codec in CODECS.values()} == {
        "float32": (1, True),
        "bfloat16": (2, False),
    }


@on_a_busy_machine
@given(st.integers(1, 2**32), SHAPES, st.data())
def test_ids_of_any_vocabulary_come_back(vocab: int, shape: tuple[int, ...], data: st.DataObject) -> None:
    ids = data.draw(arrays(np.int64, shape, elements=st.integers(0, vocab - 1)))
    payload = encode_ids(ids, vocab)
    assert len(payload) == ids.size * id_bytes(vocab) and 256 ** (id_bytes(vocab) - 1) < max(2, vocab)
    assert np.array_equal(decode_ids(payload, shape, vocab), ids)
