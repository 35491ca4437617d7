"""Token ids cross as integers of the fewest whole bytes: every id comes back, all else is refused."""

from __future__ import annotations

import numpy as np
import pytest

from compression.errors import CodecError
from compression.token_ids import MAX_VOCAB, decode_ids, encode_ids, id_bytes

VOCABULARIES = {
    256: 1,
    257: 2,
    4096: 2,
    65536: 2,
    65537: 3,
    131072: 3,
    2**24: 3,
    2**24 + 1: 4,
    2**32: 4,
}
TELLING = (0, 1, 255, 256, 257, 2049, 65535, 65536, 2**24 - 1, 2**24, 2**31, 2**32 - 1)


@pytest.mark.parametrize(("vocab", "width"), VOCABULARIES.items())
def test_every_width_holds_its_vocabulary(vocab: int, width: int) -> None:
    ids = np.array([i for i in (*TELLING, vocab - 1) if i < vocab])
    payload = encode_ids(ids, vocab)
    assert id_bytes(vocab) == width and len(payload) == width * len(ids)
    assert payload == b"".join(int(i).to_bytes(width, "little") for i in ids)
    decoded = decode_ids(payload, ids.shape, vocab)
    assert decoded.dtype == np.int64 and np.array_equal(decoded, ids)


@pytest.mark.parametrize(("vocab", "width"), [(1, 1), (2, 1), (255, 1), (65535, 2), (2**24 - 1, 3), (2**32 - 1, 4)])
def test_widths_below_their_limits(vocab: int, width: int) -> None:
    assert id_bytes(vocab) == width


@pytest.mark.parametrize("vocab", [0, -1, MAX_VOCAB + 1])
def test_a_vocabulary_that_four_bytes_cannot_hold(vocab: int) -> None:
    with pytest.raises(CodecError, match=f"expected a vocabulary of 1 to {2**32} ids, got {vocab}"):
        id_bytes(vocab)


@pytest.mark.parametrize("vocab", VOCABULARIES)
@pytest.mark.parametrize("beyond", [0, 1, 2**33])
def test_an_id_beyond_the_vocabulary_is_not_sent(vocab: int, beyond: int) -> None:
    """It would wrap: 256 in one byte is 0."""
    with pytest.raises(CodecError, match=rf"expected ids in 0\.\.{vocab - 1}, got 0\.\.{vocab + beyond}"):
        encode_ids(np.array([0, vocab + beyond]), vocab)


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_a_negative_id_is_not_sent(vocab: int) -> None:
    with pytest.raises(CodecError, match=r"got -1\.\.0"):
        encode_ids(np.array([0, -1]), vocab)


def test_an_id_of_64_bits_does_not_pass_for_a_small_one() -> None:
    with pytest.raises(CodecError, match="expected ids in"):
        encode_ids(np.array([2**63 + 5], dtype=np.uint64), 257)


@pytest.mark.parametrize("vocab", [v for v, width in VOCABULARIES.items() if v < 256**width])
def test_a_received_id_beyond_the_vocabulary_is_refused(vocab: int) -> None:
    payload = vocab.to_bytes(id_bytes(vocab), "little")
    with pytest.raises(CodecError, match=rf"expected ids in 0\.\.{vocab - 1}, got {vocab}\.\.{vocab}"):
        decode_ids(payload, (1,), vocab)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, bool, object])
def test_only_integers_are_ids(dtype: type) -> None:
    with pytest.raises(CodecError, match="expected integer ids"):
        encode_ids(np.zeros((2, 2), dtype=dtype), 257)


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.int32, np.uint32, np.int64, np.uint64])
def test_any_integer_type_gives_the_same_bytes(dtype: type) -> None:
    ids = np.array([[1, 2], [3, 200]])
    assert encode_ids(ids.astype(dtype), 70000) == bytes([1, 0, 0, 2, 0, 0, 3, 0, 0, 200, 0, 0])


def test_ids_are_in_c_order_whatever_the_memory_layout() -> None:
    ids = np.arange(12).reshape(3, 4)
    assert encode_ids(ids.T, 257) == encode_ids(ids.T.copy(), 257)
    assert np.array_equal(decode_ids(encode_ids(ids[:, ::2], 257), (3, 2), 257), ids[:, ::2])


@pytest.mark.parametrize("length", [0, 1, 11, 13, 24])
def test_a_payload_of_another_length_is_refused(length: int) -> None:
    with pytest.raises(CodecError, match=f"expected 12 bytes of ids for shape .2, 3., got {length}"):
        decode_ids(bytes(length), (2, 3), 4096)


def test_no_ids_are_no_bytes() -> None:
    assert encode_ids(np.zeros((0, 5), dtype=np.int64), 257) == b""
    assert decode_ids(b"", (0, 5), 257).shape == (0, 5)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_received_ids_do_not_share_the_transports_buffer(kind: type) -> None:
    ids = decode_ids(kind(bytes([7, 1])), (1,), 300)
    ids[0] += 1
    assert ids.tolist() == [264]
