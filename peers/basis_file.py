"""A given basis: the matrix U of `boundary.basis = "file"`, from a safetensors or an npy file.

Every peer needs the same one. The manifest has its fingerprint, which is of the numbers, not of the file.
"""

from __future__ import annotations

from pathlib import Path
from tokenize import TokenError

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from compression.basis import check_basis
from protocol.config import RunConfig
from protocol.errors import InputError, UserError


def load_basis(config: RunConfig, elsewhere: Path | None = None) -> torch.Tensor | None:
    """The run's given basis, `[d, k]` float32; None where the run has none. `elsewhere` replaces the configured path.

    Raises:
        UserError: there is no such file, or it holds no orthonormal matrix of that shape.
    """
    if config.boundary.basis != "file":
        if elsewhere is not None:
            fact = f"expected no basis of this machine's: this run's basis is {config.boundary.basis}"
            raise InputError("basis", "unneeded", fact, "leave it out")
        return None
    path = elsewhere or Path(str(config.boundary.basis_path))
    try:
        basis_DK = _read(path).to(torch.float32).contiguous()
        check_basis(basis_DK, config.model.dim, config.boundary.rank)
    except FileNotFoundError as error:
        fact = f"expected the run's basis at {path}, there is no such file"
        raise InputError("basis", "missing", fact, "correct its path") from error
    except (ValueError, OSError, SafetensorError) as error:
        raise UserError(f"the basis in {path}: {error}") from error
    return basis_DK


def _read(path: Path) -> torch.Tensor:
    """The one matrix in `path`."""
    if path.suffix == ".npy":
        return torch.from_numpy(_read_npy(path))
    if path.suffix != ".safetensors":
        raise ValueError(f"expected a file that ends in .npy or .safetensors, got {path.name}")
    return _read_safetensors(path)


def _read_npy(path: Path) -> np.ndarray:
    # Not numpy.load: it takes what begins like a zip file for an npz, whatever its name.
    try:
        with path.open("rb") as file:
            matrix: np.ndarray = np.lib.format.read_array(file, allow_pickle=False)  # type: ignore[no-untyped-call]
    except (ValueError, TypeError, EOFError, OverflowError, MemoryError, TokenError) as error:
        raise ValueError(f"expected an array as numpy.save writes it: {error}; save the matrix again") from error
    if matrix.dtype.kind not in "f":
        raise ValueError(f"expected real numbers, got the type {matrix.dtype}: save the matrix as float32")
    return matrix.astype(np.float64)


def _read_safetensors(path: Path) -> torch.Tensor:
    tensors = load_file(path)
    if len(tensors) != 1:
        raise ValueError(f"expected one tensor, got {len(tensors)}: {sorted(tensors)[:5]}")
    (matrix,) = tensors.values()
    if not matrix.is_floating_point():
        raise ValueError(f"expected real numbers, got the type {matrix.dtype}: save the matrix as float32")
    return matrix
