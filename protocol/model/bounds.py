"""Tensors and losses within the bounds of `protocol.magnitudes`: what others sent and, by the same, what is sent."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from compression.basis import check_basis
from compression.codec import Buffer, Codec
from compression.errors import CodecError
from protocol.errors import BadPart, NotFinite
from protocol.magnitudes import SURE, is_loss
from protocol.model import flat
from protocol.model.stage_sizes import BASIS
from protocol.optimizer import REMEDY

MINUS_ZERO = 0x80000000  # the bits of it


def check(x: torch.Tensor, most: float) -> None:
    """Look at a tensor that was decoded.

    Raises:
        CodecError: a number is larger than `most`.
    """
    if not _is_within(x, most):
        raise CodecError(f"expected finite numbers of at most {most:.3g}, got {float(x.abs().max()):.3g}")


def check_own(codec: Codec, x: torch.Tensor, payload: Buffer, most: float) -> None:
    """Look at `payload`, made of `x`, as its receiver will. Only near the bound need it be decoded for that.

    Raises:
        CodecError: a number is larger than `most`.
    """
    if not _is_within(x.detach(), most / SURE):
        check(codec.decode(payload, x.shape, x.device), most)


def check_own_loss(loss: float, step: int, microbatch: int) -> None:
    """Look at a loss before others hear of it.

    Raises:
        NotFinite: it is not finite, or larger than any loss that the others take.
    """
    if not is_loss(loss):
        raise NotFinite(step, f"expected a finite loss of step {step}, microbatch {microbatch}, got {loss}: {REMEDY}")


def check_bases(parts: Sequence[Buffer], layout: flat.Layout, basis_from: int) -> None:
    """Of the parts of a moving step one has the new basis, and the others add -0.0 to it, which changes no bit.

    Raises:
        BadPart: not so.
    """
    for index, part in enumerate(parts):
        numbers = flat.tensor(part, layout, BASIS)
        try:
            if index == basis_from:
                check_basis(torch.from_numpy(numbers.copy()).reshape(layout[BASIS]), *layout[BASIS])
            elif (numbers.view(np.uint32) != MINUS_ZERO).any():
                raise ValueError("expected none in the part of a replica that was sent none")
        except ValueError as error:
            raise BadPart(index, f"the replicas' basis: {error}") from error


def _is_within(x: torch.Tensor, most: float) -> bool:
    """Whether all numbers are in -most..most. Read once, without a copy."""
    return bool(torch.linalg.vector_norm(x, ord=torch.inf) <= most)
