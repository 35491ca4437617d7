"""A given basis: what is read, and what each mistake is told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from compression.basis import basis_fingerprint, random_basis
from peers.basis_file import load_basis
from peers.cli.remedies import of_volunteer, remedied
from protocol.config import RunConfig, parse_config
from protocol.errors import UserError
from protocol.model.stage import Stage


def run_config(path: Path) -> RunConfig:
    boundary = {"basis": "file", "basis_path": str(path), "rank": 4}
    return parse_config({"model": {"dim": 32, "heads": 2, "kv_heads": 1}, "boundary": boundary}, "test")


@pytest.mark.parametrize("name", ["u.npy", "u.safetensors"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_both_formats_give_the_same_basis(name: str, dtype: type, tmp_path: Path) -> None:
    given = random_basis(32, 4, 99)
    path, held = tmp_path / name, given.numpy().astype(dtype)
    np.save(path, held) if name.endswith("npy") else save_file({"basis": torch.from_numpy(held)}, path)
    found = load_basis(run_config(path))
    assert found is not None and found.dtype == torch.float32 and torch.equal(found, given)
    assert basis_fingerprint(found) == basis_fingerprint(given) != basis_fingerprint(-given)
    stage = Stage(run_config(path), 1, found)
    assert stage.boundary.basis_DK is not None and torch.equal(stage.boundary.basis_DK, given)
    moved = load_basis(run_config(tmp_path / "elsewhere.npy"), path)
    assert moved is not None and torch.equal(moved, given)


def archive(path: Path) -> None:
    """An npz under the name of an npy."""
    with path.open("wb") as file:
        np.savez(file, u=np.eye(32, 4))


def bad(write: Callable[[Path], Any], name: str = "u.npy") -> tuple[str, Callable[[Path], Any]]:
    return name, write


@pytest.mark.parametrize(
    ("file", "message"),
    [
        (bad(lambda path: None), "expected the run's basis at .*u.npy, there is no such file; .*--basis"),
        (bad(lambda path: np.save(path, np.eye(4, 32))), r"expected a basis of shape \(32, 4\) .*got \(4, 32\)"),
        (bad(lambda path: np.save(path, np.eye(32, 5))), r"expected a basis of shape \(32, 4\) .*got \(32, 5\)"),
        (bad(lambda path: np.save(path, 1.001 * np.eye(32, 4))), r"expected orthonormal columns.*differ by 2.0e-03"),
        (bad(lambda path: np.save(path, np.eye(32, 4) * np.nan)), "expected a basis of finite numbers"),
        (bad(lambda path: np.save(path, np.array([["a"]]))), "expected real numbers, got the type <U1: save"),
        (bad(lambda path: np.save(path, np.eye(32, 4) + 0.5j)), "expected real numbers, got the type complex128: save"),
        (bad(lambda path: np.save(path, np.zeros(3, [("a", "f4")]))), r"expected real numbers, got the type \[\('a'"),
        (
            bad(lambda path: np.save(path, np.array([None]))),
            "expected an array as numpy.save writes it: .*save the mat",
        ),
        (bad(lambda path: path.write_bytes(b"nonsense")), "expected an array as numpy.save writes it: .*save the mat"),
        (bad(lambda path: path.write_bytes(b"")), "expected an array as numpy.save writes it: .*save the matrix again"),
        (bad(lambda path: path.write_bytes(b"PK\3\4nonsense")), "expected an array as numpy.save writes it: .*save"),
        (bad(archive), "expected an array as numpy.save writes it: .*save the matrix again"),
        (bad(lambda path: path.write_bytes(b"\x93NUMPY\1\0\x02\0(")), "expected an array as numpy.save writes it: "),
        (
            bad(lambda path: save_file({"u": torch.zeros(32, 4, dtype=torch.complex64)}, path), "u.safetensors"),
            "expected real numbers, got the type torch.complex64: save",
        ),
        (bad(lambda path: path.write_bytes(b"nonsense"), "u.safetensors"), "the basis in .*u.safetensors: "),
        (
            bad(lambda path: path.write_bytes(b""), "u.txt"),
            "expected a file that ends in .npy or .safetensors, got u.txt",
        ),
        (
            bad(lambda path: save_file({"a": torch.zeros(1), "b": torch.zeros(1)}, path), "u.safetensors"),
            "expected one tensor, got 2",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_mistake_is_told(file: tuple[str, Callable[[Path], Any]], message: str, tmp_path: Path) -> None:
    name, write = file
    write(tmp_path / name)
    with pytest.raises(UserError, match=message), remedied(of_volunteer(None, None, None)):
        load_basis(run_config(tmp_path / name))


def test_a_run_without_a_given_basis_takes_none() -> None:
    assert load_basis(RunConfig()) is None
    with (
        pytest.raises(UserError, match=r"this run's basis is random; leave --basis out"),
        remedied(of_volunteer(None, None, None)),
    ):
        load_basis(RunConfig(), Path("u.npy"))
    with pytest.raises(ValueError, match="expected a basis exactly with"):
        Stage(RunConfig(), 0, random_basis(128, 16, 0))


def test_a_stage_of_a_run_with_a_given_basis_needs_it(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected a basis exactly with"):
        Stage(run_config(tmp_path / "u.npy"), 0)
