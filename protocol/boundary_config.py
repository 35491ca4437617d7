"""The section of a run's configuration on what crosses between two stages.

Adaptive rates: each link chooses its bits between two ends that are set here (`protocol.rate_controller`). Why rank is
not chosen along with them: `docs/design.md`.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from protocol.section import Section

CodecName = Literal["float32", "bfloat16", "int8", "int6", "int4", "int3", "int2", "topk"]
LADDER: tuple[CodecName, ...] = ("bfloat16", "int8", "int6", "int4", "int3", "int2")  # what adaptive rates choose from
LEAST_GRADIENT: CodecName = "int4"  # what was found to cost nothing that shows: docs/convergence.md


class BoundaryConfig(Section):
    """What crosses between two stages."""

    form: Literal["bottleneck", "projected", "reparam", "none"] = Field(
        "bottleneck",
        description="bottleneck: stages full-rank, the boundary narrows; projected: full-size output matrices kept "
        "inside span(U); reparam: output matrices U @ Z; none: dense",
    )
    rank: int = Field(8, ge=1, description="k: numbers per token that cross (unused by form none)")
    basis: Literal["random", "file", "moving"] = Field(
        "random", description="random: U from the seed; file: given; moving: from the seed, then toward the gradients"
    )
    basis_path: str | None = Field(None, description="safetensors or npy file with U, d x k, for basis file")
    move_every: int = Field(100, ge=2, description="steps between two moves of a moving basis")
    move_rate: float = Field(0.1, gt=0, le=1, description="how far a basis moves: the tangent of its largest angle")
    scaled_basis: bool = Field(
        False,
        description="rebuild by sqrt(d/k) U: an update of coordinates moves the stream as far as one of d",
    )
    codec: CodecName = Field(
        "int4",
        description="what each coordinate is on the wire; int*: quantised, rounded to nearest; topk: a baseline",
    )
    gradient_codec: CodecName | None = Field(
        None, description="the same for gradients, where int* rounds at random and without bias; none: as codec"
    )
    rates: Literal["fixed", "adaptive"] = Field(
        "fixed",
        description="adaptive: each link sends in the most bits with which it does not hold up the step, from codec "
        "(and gradient_codec) down to least_codec (and least_gradient_codec)",
    )
    least_codec: CodecName = Field("int4", description="adaptive rates: the fewest bits of a coordinate")
    least_gradient_codec: CodecName = Field(
        LEAST_GRADIENT, description="adaptive rates: the fewest bits of a gradient; int4 or more"
    )
    block: int = Field(64, ge=1, description="most numbers of a token that share a scale, in int* codecs")
    scale: Literal["bfloat16", "float8"] = Field(
        "float8",
        description="scales of int* codecs: bfloat16; float8: 5 bits of exponent, 3 of mantissa, no sign, in units of "
        "a power of two a tensor",
    )
    levels: Literal["uniform", "normal"] = Field(
        "normal", description="levels of int4, int3 and int2: normal: for Gaussian numbers; uniform: equally spaced"
    )
    rotation: Literal["none", "hadamard", "orthogonal"] = Field(
        "none", description="seeded rotation of each token's numbers before an int* codec, undone after it"
    )
    lossless: Literal["none", "zstd"] = Field("none", description="last stage of every codec: zstd at level 1, or none")
    keep: float = Field(1 / 16, gt=0, le=1, description="fraction of a token's numbers that topk sends")
    fixed_embedding: bool = Field(True, description="a frozen random embedding that every stage adds from the seed")
    stage_embeddings: bool = Field(True, description="stages after the first add their own trainable embedding")
    stage_embedding: Literal["table", "low_rank", "bigram"] = Field(
        "table", description="table: a row per id; low_rank: a short row, widened; bigram: a row per hashed pair of ids"
    )
    stage_embedding_size: int = Field(
        64, ge=1, le=1 << 24, description="numbers in a short row (low_rank), or rows in all (bigram); unused by table"
    )

    @model_validator(mode="after")
    def _stage_embedding_fits(self) -> BoundaryConfig:
        low_rank = self.stage_embeddings and self.stage_embedding == "low_rank"
        if low_rank and (self.form == "projected" or self.basis == "moving"):
            raise ValueError(
                'expected stage_embedding = "table" or "bigram" with form = "projected" or basis = "moving", whose '
                'rows lie in span(U), got "low_rank": set form = "reparam" and basis = "random" for a confined stream'
            )
        return self

    @model_validator(mode="after")
    def _codecs_fit(self) -> BoundaryConfig:
        names = {*self.ladder, *self.gradient_ladder}
        if self.rotation != "none" and not any(name.startswith("int") for name in names):
            raise ValueError(
                f"expected an int* codec with rotation = {self.rotation!r}, got {' and '.join(sorted(names))}: set "
                f'codec or gradient_codec to one, or rotation = "none"'
            )
        return self

    @model_validator(mode="after")
    def _rates_fit(self) -> BoundaryConfig:
        if self.rates == "fixed":
            return self
        if self.lossless != "none":
            raise ValueError(
                f'expected lossless = "none" with rates = "adaptive", got "{self.lossless}": what a packed payload '
                'would take in other bits is not known; leave it out, or set rates = "fixed"'
            )
        if self.gradient_ladder[-1] in LADDER[LADDER.index(LEAST_GRADIENT) + 1 :]:
            raise ValueError(
                f'expected least_gradient_codec = "{LEAST_GRADIENT}" or more bits, got "{self.least_gradient_codec}": '
                "gradients in fewer bits cost more than they save"
            )
        if len(self.ladder) == len(self.gradient_ladder) == 1:
            raise ValueError(
                "expected more bits in codec than in least_codec, or in gradient_codec than in least_gradient_codec, "
                f'with rates = "adaptive", got "{self.codec}" to "{self.least_codec}" and '
                f'"{self.gradient_codec or self.codec}" to "{self.least_gradient_codec}": set codec = "int8"'
            )
        return self

    @property
    def ladder(self) -> tuple[CodecName, ...]:
        """The codecs of coordinates, most bits first; with fixed rates just the one."""
        return self._rungs("codec", self.codec, "least_codec", self.least_codec)

    @property
    def gradient_ladder(self) -> tuple[CodecName, ...]:
        """The same of their gradients."""
        most = self.gradient_codec or self.codec
        return self._rungs("gradient_codec", most, "least_gradient_codec", self.least_gradient_codec)

    def _rungs(self, most_key: str, most: CodecName, least_key: str, least: CodecName) -> tuple[CodecName, ...]:
        """
        Raises:
            ValueError: the two are not on the ladder in this order.
        """
        if self.rates == "fixed":
            return (most,)
        for key, name in ((most_key, most), (least_key, least)):
            if name not in LADDER:
                raise ValueError(
                    f'expected {key} to be one of {", ".join(LADDER)} with rates = "adaptive", got "{name}": set it to '
                    'one of them, or rates = "fixed"'
                )
        first, last = LADDER.index(most), LADDER.index(least)
        if first > last:
            raise ValueError(
                f'expected {least_key} of as many bits as {most_key} = "{most}" or fewer, got "{least}": lower it, or '
                f"raise {most_key}"
            )
        return LADDER[first : last + 1]

    @model_validator(mode="after")
    def _basis_fits(self) -> BoundaryConfig:
        if self.basis == "file" and self.basis_path is None:
            raise ValueError('expected a basis_path for basis = "file", got none: add basis_path = "FILE"')
        if self.basis != "file" and self.basis_path is not None:
            raise ValueError(f'expected basis_path only with basis = "file", got it with basis = "{self.basis}"')
        if self.scaled_basis and self.form == "none":
            raise ValueError('expected scaled_basis = false with form = "none", which has no basis, got true')
        if self.basis != "random" and self.form == "none":
            raise ValueError(f'expected basis = "random" with form = "none", which has no basis, got "{self.basis}"')
        if self.basis == "moving" and self.form not in ("projected", "reparam"):
            raise ValueError(
                f'expected form = "projected" or "reparam" for basis = "moving", got "{self.form}": only what is '
                'confined to a basis can follow it; set basis = "random"'
            )
        return self
