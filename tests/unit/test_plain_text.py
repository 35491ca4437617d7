"""What others send and people read: one line, bounded, and nothing that a terminal obeys."""

import logging
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peers.cli.output import PlainFormatter
from peers.quota import Quota
from peers.refusal_log import MOST_LINES, PERIOD_SECONDS, RefusalLog
from protocol.errors import BadFrame
from protocol.join_request import join_message, parse_join
from protocol.plain_text import is_plain, plain, printable

HOSTILE = ["\x1b[2J\x1b[31mred", "a\rb", "a\nb\n\n", "\u202eevil\u202c", "\x07", "\x9b5m", "\u2028", "\ud800", "a\x00b"]


@pytest.mark.parametrize("text", HOSTILE)
def test_nothing_of_it_is_obeyed(text: str) -> None:
    assert plain(text).isprintable() and not is_plain(text)
    assert str(BadFrame(f"expected a hash, got {text}")).isprintable()


@given(st.text(), st.integers(0, 80))
def test_any_text_becomes_one_short_line_and_a_plain_one_stays(text: str, longest: int) -> None:
    line = plain(text, longest)
    assert len(line) <= longest and is_plain(line, longest) and plain(line, longest) == line.strip()


def test_a_long_text_is_cut_before_it_is_looked_at() -> None:
    assert len(plain("x" * 10_000_000, 40)) == 40 and plain({"a": "\x1b"}) == "{'a': '\\x1b'}"


@pytest.mark.parametrize("text", HOSTILE)
def test_names_that_a_terminal_obeys_are_refused(text: str) -> None:
    with pytest.raises(BadFrame):
        parse_join("ann", join_message([], {}, text), 1)


class Clock:
    """A clock that a test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_line_for_each_identity_then_a_summary(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    log = RefusalLog(logging.getLogger("test"), clock)
    for _ in range(10_000):
        log.note("12D3KooWann", "refused \x1b[2J what it sent")
    for number in range(10_000):
        log.note(f"12D3KooWstranger{number}", "refused")
    assert len(caplog.records) == MOST_LINES and all(record.getMessage().isprintable() for record in caplog.records)
    clock.now = PERIOD_SECONDS
    log.tick()
    assert len(caplog.records) == MOST_LINES + 1
    assert caplog.records[-1].getMessage().startswith(f"{20_000 - MOST_LINES} more times")
    log.note("12D3KooWann", "again")
    assert len(caplog.records) == MOST_LINES + 2


def test_a_quota_counts_each_and_all() -> None:
    clock = Clock()
    quota = Quota(10.0, 5, 2, clock)
    assert [quota.may("a") for _ in range(4)] == [True, True, False, False]
    assert [quota.may(name) for name in "bcde"] == [True, True, True, False]
    clock.now = 10.0
    assert quota.may("a") and quota.passed_over == 0


@pytest.mark.parametrize("text", HOSTILE)
def test_the_last_nets_let_nothing_through(text: str) -> None:
    record = logging.LogRecord("a", logging.WARNING, "f", 1, "it said %s", (text,), None)
    assert PlainFormatter("%(levelname)s %(message)s").format(record).isprintable()
    try:
        raise ValueError(text)
    except ValueError:
        record.exc_info = sys.exc_info()
    lines = PlainFormatter("%(message)s").format(record).split("\n")
    assert len(lines) > 3 and all(line.isprintable() for line in lines)
    assert all(line.isprintable() for line in printable(f"error: {text}").split("\n"))


def test_what_is_shown_of_our_own_keeps_its_form() -> None:
    assert printable("  steps     200\n  é ✓") == "  steps     200\n  é ✓"
