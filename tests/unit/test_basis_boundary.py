"""The basis and the boundary: orthonormal, the same on every machine, and lossless on what lies in the span."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rounding import exact, gamma, magnitude, orthonormal, product_error, within

from compression.basis import inside, random_basis
from compression.boundary import FIXED_EMBEDDING_STD, Boundary, Form
from compression.seeded import generator, normal

pytestmark = pytest.mark.kernels

ROOT = Path(__file__).resolve().parents[2]
FINGERPRINTS = """
import torch
from compression.basis import random_basis
from compression.boundary import Boundary, Form
from compression.seeded import normal
print(torch.get_num_threads())
for x in (random_basis(96, 12, 7), normal((64, 5), 0.5, 7, "w"), Boundary(Form.REPARAM, 16, 3, 300, 9, True).fixed_VD):
    print(x.numpy().tobytes().hex())
"""


def fingerprint(x: torch.Tensor) -> str:
    """Of the values rounded to four places, so that a library's last bit does not count as another generator."""
    return hashlib.sha256(",".join(str(round(v * 1e4)) for v in x.flatten().tolist()).encode()).hexdigest()[:16]


# The basis


@pytest.mark.parametrize(("dim", "rank"), [(2, 1), (16, 1), (16, 4), (16, 16), (97, 33), (256, 32)])
def test_columns_are_orthonormal(dim: int, rank: int) -> None:
    basis_DK = random_basis(dim, rank, 3)
    assert basis_DK.shape == (dim, rank) and basis_DK.dtype == torch.float32
    assert orthonormal(basis_DK)  # drawn in float64, rounded once


@pytest.mark.parametrize("rank", [0, -1, 17])
def test_a_rank_outside_the_width_is_refused(rank: int) -> None:
    with pytest.raises(ValueError, match=f"expected a rank between 1 and the model width 16, got {rank}"):
        random_basis(16, rank, 0)


def test_seeds_ranks_and_widths_give_other_bases() -> None:
    drawn = [random_basis(16, 4, 0), random_basis(16, 4, 1), random_basis(16, 5, 0), random_basis(17, 4, 0)]
    for i, a in enumerate(drawn):
        for b in drawn[:i]:
            assert (a[:16, :4] - b[:16, :4]).abs().max() > 0.1


def test_no_direction_is_preferred() -> None:
    """Without the fix of the signs, one side's diagonal has always the same sign."""
    corners = torch.stack([random_basis(8, 2, seed)[0] for seed in range(200)])
    assert corners.mean(0).abs().max() < 4 * (1 / 8 / 200) ** 0.5
    assert (corners**2).mean(0).sub(1 / 8).abs().max() < 0.04


def test_the_draws_are_pinned() -> None:
    """Peers of two releases must draw alike: a change here needs a new protocol version."""
    basis_DK = random_basis(96, 12, 7)
    assert basis_DK[0, :4].tolist() == pytest.approx([0.04141, 0.10215, 0.08628, -0.10578], abs=1e-5)
    assert fingerprint(basis_DK) == "e258d18cfbe328e3"
    drawn = normal((3, 4), 0.5, 7, "weights", "layers.0.x").flatten()[:4].tolist()
    assert drawn == pytest.approx([-0.1294, -0.40871, -0.11779, -0.53943], abs=1e-5)
    assert generator(7, "basis", 96, 12).integers(0, 2**63, 2).tolist() == [4893991753276554055, 8011190857440467993]


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_another_process_with_other_threads_draws_the_same_bits(threads: int) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "OPENBLAS_NUM_THREADS": str(threads)}
    result = subprocess.run(
        [sys.executable, "-c", FINGERPRINTS], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    seen = result.stdout.split()
    fixed_VD = Boundary(Form.REPARAM, 16, 3, 300, 9, True).fixed_VD
    assert fixed_VD is not None
    here = (random_basis(96, 12, 7), normal((64, 5), 0.5, 7, "w"), fixed_VD)
    assert seen[1:] == [x.numpy().tobytes().hex() for x in here]


# Seeded tensors


def test_a_tensor_depends_on_its_name_alone() -> None:
    alone = normal((4, 3), 1.0, 5, "weights", "b")
    torch.manual_seed(0)
    normal((7,), 1.0, 5, "weights", "a")
    assert torch.equal(normal((4, 3), 1.0, 5, "weights", "b"), alone)
    assert not torch.equal(normal((4, 3), 1.0, 5, "weights", "c"), alone)
    assert not torch.equal(normal((4, 3), 1.0, 6, "weights", "b"), alone)


def test_mean_and_deviation() -> None:
    x = normal((200, 200), 0.25, 1, "x")
    assert x.dtype == torch.float32
    assert abs(float(x.mean())) < 0.005 and abs(float(x.std()) - 0.25) < 0.005


# The boundary


@pytest.mark.parametrize("form", [Form.BOTTLENECK, Form.REPARAM])
def test_what_lies_in_the_span_crosses_unchanged(form: Form) -> None:
    boundary = Boundary(form, 16, 5, 300, 2, True).double()
    assert boundary.basis_DK is not None and boundary.width == 5
    inside_BTD = torch.randn(2, 7, 5, dtype=torch.float64) @ boundary.basis_DK.T
    c_BTK = boundary.project(inside_BTD)
    assert c_BTK.shape == (2, 7, 5)
    u_DK, z_BTK = boundary.basis_DK, inside_BTD @ boundary.basis_DK
    # The basis is orthonormal to float32, so this is as exact as that: U^T U has two rounded factors.
    assert within(boundary.rebuild(c_BTK), inside_BTD, gamma(2) * magnitude(z_BTK, u_DK.T, u_DK, u_DK.T))


def test_what_lies_outside_the_span_is_lost_and_only_that() -> None:
    boundary = Boundary(Form.BOTTLENECK, 16, 5, 300, 2, True)
    assert boundary.basis_DK is not None
    r_BTD = torch.randn(2, 7, 16)
    once_BTD = boundary.rebuild(boundary.project(r_BTD))
    u_DK = boundary.basis_DK
    assert within(once_BTD, exact(r_BTD, u_DK, u_DK.T), product_error(r_BTD, u_DK, u_DK.T))
    left_BTK = exact(r_BTD.double() - once_BTD.double(), u_DK)
    assert within(left_BTK, 0.0, product_error(r_BTD, u_DK, u_DK.T, u_DK))
    assert (r_BTD - once_BTD).norm() > 0.5 * r_BTD.norm()
    again_BTD = boundary.rebuild(boundary.project(once_BTD))
    assert within(again_BTD, once_BTD, product_error(r_BTD, u_DK, u_DK.T, u_DK, u_DK.T))


def test_coordinates_survive_a_round_trip() -> None:
    boundary = Boundary(Form.REPARAM, 16, 5, 300, 2, False)
    c_BTK = torch.randn(2, 7, 5)
    u_DK = boundary.basis_DK
    assert u_DK is not None
    assert within(boundary.project(boundary.rebuild(c_BTK)), c_BTK, product_error(c_BTK, u_DK.T, u_DK))


def test_a_dense_boundary_does_nothing() -> None:
    boundary = Boundary(Form.NONE, 16, 5, 300, 2, False)
    r_BTD = torch.randn(2, 7, 16)
    assert boundary.width == 16 and boundary.basis_DK is None
    assert boundary.project(r_BTD) is r_BTD and boundary.rebuild(r_BTD) is r_BTD


def test_a_full_rank_boundary_loses_nothing() -> None:
    boundary = Boundary(Form.BOTTLENECK, 16, 16, 300, 2, False)
    r_BTD = torch.randn(2, 7, 16)
    u_DK = boundary.basis_DK
    assert u_DK is not None
    assert within(boundary.rebuild(boundary.project(r_BTD)), r_BTD, product_error(r_BTD, u_DK, u_DK.T))


@pytest.mark.parametrize("form", list(Form))
def test_the_fixed_embedding_is_of_the_seed_and_not_trained(form: Form) -> None:
    boundary = Boundary(form, 16, 5, 300, 2, True)
    ids_BT = torch.tensor([[0, 299, 7]])
    fixed_BTD = boundary.fixed(ids_BT)
    assert isinstance(fixed_BTD, torch.Tensor) and boundary.fixed_VD is not None
    assert torch.equal(fixed_BTD[0, 1], normal((300, 16), FIXED_EMBEDDING_STD, 2, "fixed_embedding")[299])
    assert list(boundary.parameters()) == [] and boundary.state_dict() == {}
    assert Boundary(form, 16, 5, 300, 2, False).fixed(ids_BT) == 0.0


def test_which_forms_confine_and_which_narrow() -> None:
    assert {form.value: (form.confines_writes, form.holds_coordinates, form.narrows) for form in Form} == {
        "bottleneck": (False, False, True),
        "projected": (True, False, True),
        "reparam": (True, True, True),
        "none": (False, False, False),
    }


# The scale


@pytest.mark.parametrize("scaled", [False, True])
def test_an_update_of_all_coordinates_moves_the_stream_as_far_as_one_of_all_its_entries(scaled: bool) -> None:
    boundary = Boundary(Form.REPARAM, 64, 4, 300, 2, True, scaled)
    update = 0.1 * torch.tensor([[1.0, -1.0, -1.0, 1.0]])
    assert boundary.basis_DK is not None
    error = boundary.scale * product_error(update, boundary.basis_DK.T, more=2).norm()
    moved = boundary.rebuild(update).double().norm()
    assert within(moved, 0.1 * (64 if scaled else 4) ** 0.5, error)


@pytest.mark.parametrize("form", [Form.BOTTLENECK, Form.PROJECTED, Form.REPARAM])
def test_a_scale_changes_the_coordinates_and_not_what_is_rebuilt(form: Form) -> None:
    plain, scaled = (Boundary(form, 64, 4, 300, 2, True, scaled) for scaled in (False, True))
    r_BTD = torch.randn(2, 7, 64)
    u_DK = plain.basis_DK
    assert u_DK is not None
    there, back = (2 * product_error(r_BTD, *factors, more=2) for factors in ((u_DK,), (u_DK, u_DK.T)))
    assert within(4 * scaled.project(r_BTD), plain.project(r_BTD), there)
    assert within(scaled.rebuild(scaled.project(r_BTD)), plain.rebuild(plain.project(r_BTD)), back)


def test_a_dense_boundary_has_no_scale() -> None:
    assert Boundary(Form.NONE, 64, 4, 300, 2, True, True).scale == 1.0


# Projection


def test_the_part_inside_the_span_along_either_axis() -> None:
    basis_DK = random_basis(16, 4, 3)
    x = torch.randn(16, 9)
    both = (basis_DK, basis_DK.T)
    expected, error = exact(*both, x), product_error(*both, x)
    assert within(inside(x, basis_DK, 0), expected, error)
    assert within(inside(x.T, basis_DK, 1), expected.T, error.T)
    assert within(inside(inside(x, basis_DK, 0), basis_DK, 0), expected, product_error(*both, *both, x))
