"""Images and their labels, and which of them are held out.

An image is held out by its own pixels' hash: the part it belongs to does not depend on the order of the set, on its
size or on the run, and two equal images never lie on both sides.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from protocol.config import RunConfig
from protocol.errors import UserError
from protocol.samples import Ints, epoch_places, unigram_loss

HELD_OUT_SHARE = 0.2


@dataclass(frozen=True, eq=False)
class ImageStore:
    """A run's images, each a row of its pixels and, last, its label: `[n, H x W + 1]`. A `peers.data.run_data.RunData`.

    `fingerprint` (sha256, hex) is that of all pixels and labels; `unigram_loss` is that of `train`'s labels, in nats.
    """

    train: Ints
    held_out: Ints
    fingerprint: str
    unigram_loss: float

    def microbatch(self, config: RunConfig, step: int, index: int) -> Ints:
        """`[B, H x W + 1]`: microbatch `index` of `step`."""
        train = config.train
        return self.train[
            epoch_places(config.seed, step, index, train.microbatch_size, train.microbatches, len(self.train))
        ]

    def held_out_microbatches(self, config: RunConfig) -> list[Ints]:
        """All held-out images in microbatches; the last may be smaller."""
        size = config.train.microbatch_size
        return [self.held_out[start : start + size] for start in range(0, len(self.held_out), size)]


def load_images(source: str) -> ImageStore:
    """The images of `source`.

    Raises:
        UserError: the library that brings them is not installed.
    """
    pixels, labels = {"digits": _digits}[source]()
    return split(np.concatenate([pixels.reshape(len(pixels), -1), labels[:, None]], axis=1).astype(np.int64))


def split(rows: Ints) -> ImageStore:
    """The store of `rows` `[n, H x W + 1]`."""
    held_out = np.array([_is_held_out(row[:-1]) for row in rows])
    fingerprint = hashlib.sha256(rows.astype("<u4").tobytes()).hexdigest()
    train = rows[~held_out]
    return ImageStore(train, rows[held_out], fingerprint, unigram_loss(np.bincount(train[:, -1])))


def _is_held_out(pixels: Ints) -> bool:
    digest = hashlib.sha256(pixels.astype("<u4").tobytes()).digest()
    return int.from_bytes(digest[:8], "big") < HELD_OUT_SHARE * 2**64


def _digits() -> tuple[npt.NDArray[np.float64], Ints]:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise UserError(
            'expected scikit-learn, which brings the images of data.source = "digits", but it is not installed: '
            "pip install 'isthmus[vision]', or pip install scikit-learn"
        ) from error
    digits = load_digits()
    return digits.images, digits.target
