"""The codecs of a run: by the names that its configuration uses, by direction, and by the tags in frames.

    tag   1 float32   2 bfloat16   3 top-k   16 + b quantised to b bits   + 128 compressed by zstd

A tag says how many bits were used. All else (block, scales, levels, rotation, what top-k keeps) is the run's, so that a
set can decode each of its tags. Which of them a frame may carry is not decided here but in `protocol.model.payload`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from compression.codec import CastCodec, Codec
from compression.errors import CodecError
from compression.lossless import ZstdCodec
from compression.quantise import BlockCodec
from compression.rotation import RotatedCodec
from compression.seeded import derived_seed
from compression.topk import TopKCodec

CASTS = {"float32": (1, torch.float32), "bfloat16": (2, torch.bfloat16)}
TOPK = ("topk", 3)
QUANTISED = {"int8": 8, "int6": 6, "int4": 4, "int3": 3, "int2": 2}  # bits a number
NAMES = (*CASTS, *QUANTISED, TOPK[0])


@dataclass(frozen=True, slots=True)
class CodecOptions:
    """What a run's configuration says of its codecs; see `protocol.boundary_config.BoundaryConfig`.

    Attributes:
        forward: the name of the coordinates' codec.
        gradient: the name of their gradients' codec.
        block: most numbers that share a scale.
        scale: "bfloat16" or "float8".
        levels: "uniform" or "normal".
        rotation: "none", "hadamard" or "orthogonal", for the quantised ones.
        lossless: "none" or "zstd".
        keep: the fraction that top-k keeps.
        seed: the run's.
    """

    forward: str = "bfloat16"
    gradient: str = "bfloat16"
    block: int = 64
    scale: str = "float8"
    levels: str = "normal"
    rotation: str = "none"
    lossless: str = "none"
    keep: float = 1 / 16
    seed: int = 0


class CodecSet:
    """All codecs with one set of options. `forward` and `gradient` are those that this run begins with."""

    def __init__(self, options: CodecOptions) -> None:
        plain = {name: _codec(name, options) for name in NAMES}
        packed = {name: ZstdCodec(codec) for name, codec in plain.items()}
        self._by_tag: dict[int, Codec] = {codec.tag: codec for codec in (*plain.values(), *packed.values())}
        self._sent: dict[str, Codec] = {**(plain if options.lossless == "none" else packed)}
        self.forward, self.gradient = self.named(options.forward), self.named(options.gradient)

    def named(self, name: str) -> Codec:
        """The codec that this run sends with under `name`."""
        return self._sent[name]

    def by_tag(self, tag: int) -> Codec:
        """The codec that a frame names.

        Raises:
            CodecError: no codec has this tag.
        """
        if tag not in self._by_tag:
            raise CodecError(f"expected a codec tag in {sorted(self._by_tag)}, got {tag}")
        return self._by_tag[tag]


def _codec(name: str, options: CodecOptions) -> Codec:
    if name in CASTS:
        return CastCodec(name, *CASTS[name])
    if name == TOPK[0]:
        return TopKCodec(*TOPK, options.keep)
    bits = QUANTISED[name]
    blocks = BlockCodec(name, 16 + bits, bits, options.block, options.levels, options.scale)
    if options.rotation == "none":
        return blocks
    return RotatedCodec(blocks, options.rotation, derived_seed(options.seed, "rotation"))
