"""What a tensor frame of a run carries: the codecs, the shapes, and the length that a header may state.

A forward frame's payload is `ids | coordinates`, a backward frame's the gradient of the coordinates. Those of the basis
microbatch (`protocol.basis_microbatch`) are empty forward, and the basis backward.
"""

from __future__ import annotations

from dataclasses import dataclass

from compression.codec import CastCodec
from compression.registry import CASTS, CodecOptions, CodecSet
from compression.token_ids import id_bytes
from protocol.basis_microbatch import basis_payload_bytes, is_basis_microbatch
from protocol.config import RunConfig
from protocol.errors import BadFrame
from protocol.frame import Header, Kind

BASIS_CODEC = CastCodec("float32", *CASTS["float32"])  # whatever the run's: all stages must have the same bits


@dataclass(frozen=True, slots=True)
class PayloadRule:
    """What the payload of one kind of tensor frame must be.

    Attributes:
        codec: the tag.
        most: bytes, exactly so many if `exact`.
    """

    codec: int
    most: int
    exact: bool

    def check(self, header: Header) -> None:
        """Look at an incoming header before its payload is decoded.

        Raises:
            BadFrame: it names another codec, or states a length that this codec does not make.
        """
        fits = header.length == self.most if self.exact else header.length <= self.most
        if header.codec != self.codec or not fits:
            exactly = "" if self.exact else "at most "
            raise BadFrame(
                f"expected {exactly}{self.most} bytes in codec {self.codec}, got {header.length} in {header.codec}"
            )


def codecs(config: RunConfig) -> CodecSet:
    """The run's codecs."""
    boundary = config.boundary
    return CodecSet(
        CodecOptions(
            forward=boundary.codec,
            gradient=boundary.gradient_codec or boundary.codec,
            block=boundary.block,
            scale=boundary.scale,
            levels=boundary.levels,
            rotation=boundary.rotation,
            lossless=boundary.lossless,
            keep=boundary.keep,
            seed=config.seed,
        )
    )


def payload_rules(config: RunConfig) -> dict[Kind, PayloadRule]:
    """The rules of forward and backward frames, by their codecs' own declarations."""
    run, shape = codecs(config), coordinates_shape(config)
    rules = {}
    for kind, codec, ids in ((Kind.FORWARD, run.forward, ids_bytes(config)), (Kind.BACKWARD, run.gradient, 0)):
        rules[kind] = PayloadRule(codec.tag, ids + codec.payload_bytes(shape), codec.exact_size)
    return rules


class PayloadCheck:
    """The rules of all tensor frames of a run, those of the basis microbatch among them."""

    def __init__(self, config: RunConfig) -> None:
        self._config, self._rules = config, payload_rules(config)
        self._basis = {
            kind: PayloadRule(BASIS_CODEC.tag, basis_payload_bytes(config, kind), exact=True) for kind in self._rules
        }

    def most(self, kind: Kind) -> int:
        """The most bytes of any frame of `kind`."""
        return max(self._rules[kind].most, self._basis[kind].most)

    def check(self, header: Header) -> None:
        """Raises:
        BadFrame: see `PayloadRule.check`.
        """
        is_basis = is_basis_microbatch(self._config, header.step, header.microbatch)
        (self._basis if is_basis else self._rules)[header.kind].check(header)


def ids_shape(config: RunConfig) -> tuple[int, int]:
    """Of the ids in a forward frame (text: `[B, T + 1]`; images: the labels, `[B, 1]`)."""
    return config.train.microbatch_size, config.task.carried


def ids_bytes(config: RunConfig) -> int:
    """Bytes of the ids in a forward frame."""
    batch, length = ids_shape(config)
    return batch * length * id_bytes(config.task.alphabet)


def coordinates_shape(config: RunConfig) -> tuple[int, int, int]:
    """Of the coordinates, and of their gradient: `[B, T, K]`."""
    return config.train.microbatch_size, config.task.positions, config.boundary_width
