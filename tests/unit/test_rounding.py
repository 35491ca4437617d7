"""The bounds themselves, that no test goes round them, and that the machine is the one that was asked for."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest
import torch
from rounding import exact, gamma, orthonormal, outside_error, product_error, unit_roundoff, within

from compression.basis import inside, random_basis

pytestmark = pytest.mark.kernels

TESTS = Path(__file__).resolve().parents[1]


def test_the_unit_roundoff_is_the_largest_error_of_one_operation() -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        one, u = torch.ones((), dtype=dtype), unit_roundoff(dtype)
        assert one + u == one and one + 2 * u > one


def test_sums_in_any_order_stay_within_the_bound_and_use_it() -> None:
    """Terms that cancel, in a hundred orders: the largest error is no small part of what one rounding may make."""
    make = torch.Generator().manual_seed(1)
    terms = torch.randn(64, generator=make)
    terms = torch.cat([terms, -terms + 1e-3 * torch.randn(64, generator=make)])
    wanted, size = terms.double().sum(), terms.double().abs().sum()
    errors = []
    for _ in range(100):
        total = torch.zeros(())
        for term in terms[torch.randperm(128, generator=make)]:
            total = total + term
        assert within(total, wanted, gamma(127) * size)
        errors.append(float((total - wanted).abs()))
    assert len(set(errors)) > 10 and max(errors) > 0.01 * gamma(1) * size


@pytest.mark.parametrize("shape", [(3, 500, 4), (40, 7, 40)])
def test_a_product_stays_within_its_bound_and_a_wrong_one_does_not(shape: tuple[int, int, int]) -> None:
    make = torch.Generator().manual_seed(2)
    a, b = torch.randn(shape[0], shape[1], generator=make), torch.randn(shape[1], shape[2], generator=make)
    assert within(a @ b, exact(a, b), product_error(a, b))
    assert not within(a.bfloat16().float() @ b, exact(a, b), product_error(a, b))


def test_a_python_float_is_compared_as_it_is() -> None:
    assert not within(1.0 + 1e-9, 1.0, 1e-10) and within(1.0 + 1e-11, 1.0, 1e-10)
    assert not within(float("nan"), 1.0, float("inf"))


def test_bases_and_projections() -> None:
    basis = random_basis(24, 5, 1)
    assert orthonormal(basis) and not orthonormal(basis * (1 + 1e-6))
    x = torch.randn(24, 300, generator=torch.Generator().manual_seed(3))
    held = inside(x, basis, 0)
    left = held.double() - exact(basis, basis.T, held)
    assert left.norm() < outside_error(basis, float(held.norm() / x.norm())) * held.norm()


def test_the_machine_is_the_one_that_was_asked_for() -> None:
    """`scripts/test` runs these tests as another machine too; were the variable not heard, it would prove nothing."""
    asked = os.environ.get("ATEN_CPU_CAPABILITY")
    if asked is not None:
        assert torch.backends.cpu.get_cpu_capability() == asked.upper()


def test_no_test_has_a_tolerance_of_its_own() -> None:
    """Tensors are compared `within` a bound, or bit for bit: `allclose` brings a number that one machine gave."""
    for path in TESTS.rglob("*.py"):
        called = {node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
        assert not called & {"allclose", "assert_close", "isclose", "assert_allclose"}, path.name


def test_what_is_compared_within_a_bound_runs_on_the_other_machine_too() -> None:
    for path in TESTS.rglob("test_*.py"):
        text = path.read_text()
        if "from rounding import" in text or "from stage_chain import" in text:
            assert "pytest.mark.kernels" in text, path.name
