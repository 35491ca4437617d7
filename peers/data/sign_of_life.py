"""A word from work that takes long, so that nobody takes it for dead."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

FIRST_SECONDS = 2.0
MOST_SECONDS = 30.0


@contextmanager
def sign_of_life(say: Callable[[str], None], what: str) -> Iterator[None]:
    """While the block runs, say that it does `what`: after FIRST_SECONDS, then ever more rarely.

    It is said from a thread, for the work may be one call into a library that comes back at its end.
    """
    done, began = threading.Event(), time.monotonic()

    def tell() -> None:
        wait = FIRST_SECONDS
        while not done.wait(wait):
            say(f"{what}: {time.monotonic() - began:.0f} s so far")
            wait = min(2 * wait, MOST_SECONDS)

    teller = threading.Thread(target=tell, name="sign of life", daemon=True)
    teller.start()
    try:
        yield
    finally:
        done.set()
        teller.join()
