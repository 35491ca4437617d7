"""The levels of a quantiser, from -1 to 1: code i stands for level i times the block's scale.

`uniform`: equally spaced. Up to 4 bits all 2^b levels are used and 0 lies between two of them (mid-rise): three levels
instead of four would waste a quarter of int2. From 5 bits on there are 2^b - 1, and 0 is a level.

`normal`, for 2 to 4 bits: the levels that lose least on Gaussian numbers (Lloyd-Max), closer together where numbers are
frequent. A random orthonormal projection makes coordinates nearly Gaussian.

Rounding to nearest takes the nearest level. Stochastic rounding takes one of the two around the number, the upper one
with the probability that makes the expectation exact.
"""

from __future__ import annotations

import torch

# The positive half of the Lloyd-Max levels of N(0, 1), in deviations: each level is the mean of the numbers nearest to
# it, c_i = (pdf(t_i) - pdf(t_i+1)) / (cdf(t_i+1) - cdf(t_i)) with t_i half-way between c_i-1 and c_i. The fixed point
# of that iteration (Lloyd 1982, Least squares quantization in PCM, IEEE Trans. Inf. Theory 28, section V; Max 1960).
LLOYD_MAX = {
    2: (0.4527800, 1.5104176),
    3: (0.2450942, 0.7560053, 1.3439092, 2.1519457),
    4: (0.1283950, 0.3880483, 0.6567591, 0.9423404, 1.2562312, 1.6180464, 2.0690172, 2.7325896),
}  # fmt: skip

_CELLS = 4096


class Levels:
    """Levels in rising order from -1 to 1, `values`, and what numbers between them become."""

    def __init__(self, values: torch.Tensor) -> None:
        self._tables = {torch.device("cpu"): values}

    def values(self, device: torch.device) -> torch.Tensor:
        """The levels on `device`, float32."""
        if device not in self._tables:
            self._tables[device] = self._tables[torch.device("cpu")].to(device)
        return self._tables[device]

    def nearest(self, y: torch.Tensor) -> torch.Tensor:
        """The codes of the levels nearest to `y`, int32; beyond the ends the outermost."""
        raise NotImplementedError

    def snap(self, y: torch.Tensor) -> torch.Tensor:
        """The levels nearest to `y`, float32."""
        return take(self.values(y.device), self.nearest(y))

    def stochastic(self, y: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Codes, int32, of levels that are `y` in expectation. `y` lies in -1..1."""
        values = self.values(y.device)
        below = self.nearest(y)
        below = (below - (take(values, below) > y).to(torch.int32)).clamp_(0, len(values) - 2)
        low, high = take(values, below), take(values, below + 1)
        drawn = torch.rand(y.shape, generator=generator, device=y.device)
        return below + (drawn * (high - low) < y - low).to(torch.int32)

    def value(self, codes: torch.Tensor) -> torch.Tensor:
        """The levels of `codes` (int32), float32. Codes above the last level count as the last."""
        values = self.values(codes.device)
        return take(values, codes.clamp(max=len(values) - 1))


class UniformLevels(Levels):
    """Equally spaced."""

    def __init__(self, bits: int) -> None:
        count = 2**bits if bits <= 4 else 2**bits - 1
        self._half = (count - 1) / 2
        super().__init__(((torch.arange(count, dtype=torch.float64) - self._half) / self._half).to(torch.float32))

    def nearest(self, y: torch.Tensor) -> torch.Tensor:
        """See `Levels`. Half-way numbers take the upper level."""
        codes: torch.Tensor = (y * self._half).add_(self._half + 0.5).clamp_(0, 2 * self._half)
        return codes.to(torch.int32)


class NormalLevels(Levels):
    """Lloyd-Max for Gaussian numbers.

    The nearest level is looked up in a table of `_CELLS` equal cells from -1 to 1: a number takes the level nearest to
    its cell's middle. Within 1/4096 of the point half-way between two levels that may be the farther one, which costs
    less than 1e-4 of the squared error and saves a search for each number.
    """

    def __init__(self, bits: int) -> None:
        positive = torch.tensor(LLOYD_MAX[bits], dtype=torch.float64) / LLOYD_MAX[bits][-1]
        values = torch.cat((-positive.flip(0), positive))
        super().__init__(values.to(torch.float32))
        middles = (torch.arange(_CELLS, dtype=torch.float64) + 0.5) * (2 / _CELLS) - 1
        codes = torch.bucketize(middles, (values[1:] + values[:-1]) / 2, out_int32=True)
        self._cells = {torch.device("cpu"): (codes, values.to(torch.float32)[codes])}

    def nearest(self, y: torch.Tensor) -> torch.Tensor:
        """See `Levels`."""
        return take(self._tables_of_cells(y.device)[0], _cells(y))

    def snap(self, y: torch.Tensor) -> torch.Tensor:
        """See `Levels`."""
        return take(self._tables_of_cells(y.device)[1], _cells(y))

    def _tables_of_cells(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """For each cell the nearest level's code, and that level."""
        if device not in self._cells:
            codes, levels = self._cells[torch.device("cpu")]
            self._cells[device] = codes.to(device), levels.to(device)
        return self._cells[device]


def _cells(y: torch.Tensor) -> torch.Tensor:
    cells: torch.Tensor = (y * (_CELLS / 2)).add_(_CELLS / 2).clamp_(0, _CELLS - 1)
    return cells.to(torch.int32)


def take(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """`table[index]`; faster on a CPU than the subscript."""
    return table.index_select(0, index.reshape(-1)).view(index.shape)
