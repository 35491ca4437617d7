"""Token ids on the wire: unsigned little-endian integers of the fewest whole bytes that hold the vocabulary.

Never floats: bfloat16 is exact only up to 256. A width of three bytes exists because vocabularies between 65,537
and 16.8 million are common, and beside a narrow strip a fourth byte would show.
"""

from __future__ import annotations

import numpy as np

from compression.errors import CodecError

MAX_VOCAB = 1 << 32


def id_bytes(vocab: int) -> int:
    """Bytes per id: 1 up to 256 ids, 2 up to 65,536, 3 up to 16,777,216, 4 up to 2^32.

    Raises:
        CodecError: the vocabulary is empty or does not fit into 4 bytes.
    """
    if not 1 <= vocab <= MAX_VOCAB:
        raise CodecError(f"expected a vocabulary of 1 to {MAX_VOCAB} ids, got {vocab}")
    return max(1, ((vocab - 1).bit_length() + 7) // 8)


def encode_ids(ids: np.ndarray, vocab: int) -> bytes:
    """The bytes of `ids`, any shape, in C order.

    Raises:
        CodecError: not integers, or an id outside 0..vocab-1 (it would wrap).
    """
    if not np.issubdtype(ids.dtype, np.integer):
        raise CodecError(f"expected integer ids, got {ids.dtype}")
    width = id_bytes(vocab)
    _check_range(ids, vocab)
    wide = np.ascontiguousarray(ids, dtype="<u4").reshape(-1)
    return wide.view(np.uint8).reshape(-1, 4)[:, :width].tobytes()


def decode_ids(payload: bytes | bytearray | memoryview, shape: tuple[int, ...], vocab: int) -> np.ndarray:
    """The ids as an int64 array of `shape`.

    Raises:
        CodecError: another length than `shape` needs, or an id outside the vocabulary.
    """
    width = id_bytes(vocab)
    expected = int(np.prod(shape)) * width
    if len(payload) != expected:
        raise CodecError(f"expected {expected} bytes of ids for shape {shape}, got {len(payload)}")
    wide = np.zeros((int(np.prod(shape)), 4), dtype=np.uint8)
    wide[:, :width] = np.frombuffer(payload, dtype=np.uint8).reshape(-1, width)
    ids = wide.view("<u4").reshape(shape).astype(np.int64)
    _check_range(ids, vocab)
    return ids


def _check_range(ids: np.ndarray, vocab: int) -> None:
    if ids.size and (int(ids.min()) < 0 or int(ids.max()) >= vocab):
        raise CodecError(f"expected ids in 0..{vocab - 1}, got {int(ids.min())}..{int(ids.max())}")
