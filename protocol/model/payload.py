"""What a tensor frame of a run carries: the codecs, the shapes, and the length that a header may state.

With adaptive rates a frame may be in any codec between the two that the run sets, the rungs of its ladder, and has just
the length that this one makes.

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
from protocol.frame import HEADER_BYTES, Header, Kind
from protocol.rate_controller import Rung

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
    """The rules of forward and backward frames, by their codecs' own declarations: of those of the most bits."""
    return {kind: rules[0] for kind, rules in _rules(config).items()}


def _rules(config: RunConfig) -> dict[Kind, tuple[PayloadRule, ...]]:
    """Of each rung, most bits first. A rung that is not shorter than the one before it is left out."""
    run, shape = codecs(config), coordinates_shape(config)
    forward, gradient = config.boundary.ladder, config.boundary.gradient_ladder
    found: dict[Kind, tuple[PayloadRule, ...]] = {}
    for kind, names, ids in ((Kind.FORWARD, forward, ids_bytes(config)), (Kind.BACKWARD, gradient, 0)):
        rules: list[PayloadRule] = []
        for codec in map(run.named, names):
            most = ids + codec.payload_bytes(shape)
            if not rules or most < rules[-1].most:
                rules.append(PayloadRule(codec.tag, most, codec.exact_size))
        found[kind] = tuple(rules)
    return found


def rate_ladders(config: RunConfig) -> dict[Kind, tuple[Rung, ...]]:
    """What a link of the run can choose from, most bits first."""
    run = codecs(config)
    return {
        kind: tuple(Rung(rule.codec, run.by_tag(rule.codec).name, HEADER_BYTES + rule.most) for rule in rules)
        for kind, rules in _rules(config).items()
    }


class PayloadCheck:
    """The rules of all tensor frames of a run, those of the basis microbatch among them."""

    def __init__(self, config: RunConfig) -> None:
        self._config, self._rules = config, _rules(config)
        self._basis = {
            kind: PayloadRule(BASIS_CODEC.tag, basis_payload_bytes(config, kind), exact=True) for kind in self._rules
        }

    def most(self, kind: Kind) -> int:
        """The most bytes of any frame of `kind`."""
        return max(self._rules[kind][0].most, self._basis[kind].most)

    def check(self, header: Header) -> None:
        """Raises:
        BadFrame: see `PayloadRule.check`.
        """
        if is_basis_microbatch(self._config, header.step, header.microbatch):
            return self._basis[header.kind].check(header)
        rules = self._rules[header.kind]
        rule = next((rule for rule in rules if rule.codec == header.codec), None)
        if rule is None and len(rules) > 1:
            raise BadFrame(f"expected a codec in {[rule.codec for rule in rules]}, got {header.codec}")
        (rule or rules[0]).check(header)


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
