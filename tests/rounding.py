"""How far float arithmetic may stray from what is exact: bounds from the arithmetic, none from one machine.

Two machines add the same numbers in another order, fuse a multiplication with its addition or not, and so differ in the
last bits. A tolerance that was tried on one of them is a guess about all others. What holds on every machine (Higham
2002, "Accuracy and Stability of Numerical Algorithms", sections 2.2, 3.1 and 3.5):

    one operation       fl(a op b) = (a op b)(1 + e),  |e| <= u         u = 2^-24 in float32, 2^-53 in float64
    n of them in a row  error <= gamma(n) x magnitude,                  gamma(n) = n u / (1 - n u)
    a sum of n terms    n - 1 in a row, in any order;                   magnitude: the sum of |x_i|
    a product A B       as many in a row as A has columns;              magnitude: |A| |B|

The magnitude is that of what is added, not of the result: where terms cancel, the result may be small and its error is
not. Factors that are themselves rounded count one more each.

A test computes what is exact in float64, whose own roundings are 2^29 times smaller, and then asserts `within` the
bound. Or, where the rule under test is the same in every precision, it runs in float64 throughout: the tolerance is
then that much sharper, and a wrong formula is as far away as ever.

Through a whole model a bound counted like this is far above what happens. There the same comparison in float64 measures
how much the model raises rounding, on the very machine; in float32 all errors are FLOAT32_OVER_FLOAT64 times that.
"""

from __future__ import annotations

from functools import reduce

import torch

Number = torch.Tensor | float

FLOAT32_OVER_FLOAT64 = 2.0**29  # the ratio of their roundings

# Two ways to compute one small model differ by some 1e-15 in float64, and from a wrong one by 1e-6 at the least.
SAME_MODEL = 1e-10


def unit_roundoff(dtype: torch.dtype = torch.float32) -> float:
    """The largest relative error of one operation, half the distance from 1 to the next number."""
    return torch.finfo(dtype).eps / 2


def gamma(roundings: int, dtype: torch.dtype = torch.float32) -> float:
    """The largest relative error of so many roundings in a row."""
    product = roundings * unit_roundoff(dtype)
    return product / (1 - product)


def magnitude(*factors: torch.Tensor) -> torch.Tensor:
    """The product of the factors' absolute values, float64."""
    return reduce(torch.matmul, (factor.detach().double().abs() for factor in factors))


def exact(*factors: torch.Tensor) -> torch.Tensor:
    """The product of the factors, float64."""
    return reduce(torch.matmul, (factor.detach().double() for factor in factors))


def product_error(*factors: torch.Tensor, more: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The largest error of each entry of a product of matrices that is computed in `dtype`.

    Args:
        factors: each counts as rounded once.
        more: roundings besides those of the products and the factors.
    """
    inner = sum(factor.shape[-1] for factor in factors[:-1])
    return gamma(inner + len(factors) + more, dtype) * magnitude(*factors)


def within(found: Number, wanted: Number, error: Number) -> bool:
    """Whether `found` is finite and no entry of it is further than `error` from `wanted`; compared in float64."""
    # A Python float is float64, and torch would make float32 of it.
    found, wanted, error = (torch.as_tensor(x, dtype=torch.float64).detach() for x in (found, wanted, error))
    return bool(torch.isfinite(found).all()) and bool(((found - wanted).abs() <= error).all())


def orthonormal(basis_DK: torch.Tensor, roundings: int = 1) -> bool:
    """Whether the columns are orthonormal but for `roundings` in each entry; the product is taken in float64."""
    error = gamma(2 * roundings) * magnitude(basis_DK.T, basis_DK)
    return within(exact(basis_DK.T, basis_DK), torch.eye(basis_DK.shape[1]), error)


def outside_error(basis_DK: torch.Tensor, kept: float = 1.0) -> float:
    """How large the part outside span(U) may be in what was projected in float32, relative to its norm.

    | fl(x U U^T) - x U U^T | <= gamma(D + K + 2) |x| |U| |U|^T, in norms |x| times the square of the norm of |U|.

    Args:
        kept: the norm that the projection left, relative to that of x.
    """
    dim, rank = basis_DK.shape
    return gamma(dim + rank + 2) * float(torch.linalg.matrix_norm(basis_DK.double().abs(), 2)) ** 2 / kept
