"""What a daemon cannot show must not end it."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest

from peers.cli.common import LastingConsole


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_costs_lines_and_not_the_run(caplog: pytest.LogCaptureFixture) -> None:
    file = Path("/dev/full").open("w")  # noqa: SIM115  (closing it fails too)
    console = LastingConsole(file=file)
    console.print("one")
    console.print("two")
    assert len(caplog.records) == 1 and "No space left" in caplog.text
    with suppress(OSError):
        file.close()
