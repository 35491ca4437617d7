"""What a person sees while a run trains: on terminals of any width, and words that agree with their numbers."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from peers.screen import Screen, compared
from protocol.config import RunConfig

ROW: dict[str, Any] = {
    "step": 12,
    "loss": 3.3739,
    "tokens_per_second": 2254.0,
    "forward_bytes_per_token": 7.2,
    "backward_bytes_per_token": 5.1,
    "seconds": 0.91,
}


def shown(width: int) -> str:
    """The last state of the live line on a terminal of `width` columns."""
    out = io.StringIO()
    screen = Screen(Console(file=out, width=width, force_terminal=True, color_system=None), RunConfig(), 5.5)
    screen.began(1, 600)
    screen.row(ROW)
    screen.close()
    return [line for line in out.getvalue().splitlines() if "12/600" in line][-1]


@pytest.mark.parametrize("width", [20, 30, 45, 60, 80, 100, 160])
def test_step_and_loss_are_seen_on_a_terminal_of_any_width(width: int) -> None:
    line = shown(width)
    assert "3.3739" in line


@pytest.mark.parametrize("width", [45, 80, 160])
def test_there_is_room_for_the_speed(width: int) -> None:
    assert "2,254 tokens/s" in shown(width)


@pytest.mark.parametrize(
    ("ratio", "words"),
    [(41.6, "41.6x less"), (0.5, "2.0x more"), (1.0, "as much"), (0.98, "as much"), (1.5, "1.5x less")],
)
def test_what_is_more_is_not_called_less(ratio: float, words: str) -> None:
    assert compared(ratio) == words


def test_a_run_with_nothing_left_to_train_says_so() -> None:
    out = io.StringIO()
    screen = Screen(Console(file=out, width=200), RunConfig(), 5.5)
    screen.began(9, 3)
    assert "step 3 is done already" in out.getvalue() and "from step 9" not in out.getvalue()
