"""What this machine can do, measured for its place in a run: how fast it multiplies, how much memory is free."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch

SIDE = 512
MEASURED_SECONDS = 0.2


def measured_speed(device: str) -> float:
    """GFLOP/s of float32 matrix products of `SIDE` x `SIDE` on `device`, over a fifth of a second."""
    a = torch.randn(SIDE, SIDE, device=device)
    _multiply(a)  # the first one starts threads and libraries
    products, start = 0, time.perf_counter()
    while (seconds := time.perf_counter() - start) < MEASURED_SECONDS:
        _multiply(a)
        products += 1
    return products * 2 * SIDE**3 / seconds / 1e9


def _multiply(a: torch.Tensor) -> float:
    return float((a @ a)[0, 0])  # reading a number waits for the device


def free_memory(device: str) -> int:
    """Bytes that are free on `device`."""
    if torch.device(device).type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def compute_clock(device: str) -> Callable[[], float]:
    """A clock for what the calling thread computes: of its processor time, unless torch computes elsewhere too."""
    alone = torch.device(device).type == "cpu" and torch.get_num_threads() == 1
    return time.thread_time if alone else time.perf_counter
