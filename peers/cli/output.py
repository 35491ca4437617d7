"""What the commands show: nothing that a terminal obeys, and no fault of the showing touches the work.

An output can end before the command does: `| head -1` has seen enough, and a Ctrl-C ends `| tee log` together with the
command's own foreground. Or its disk is full. What cannot be shown is lost, and the work and its exit code are as if it
had been shown. A stream that is closed at the other end is replaced by the null device, or the interpreter would fail
over what is left in its buffer when it ends.
"""

from __future__ import annotations

import errno
import logging
import os
import sys
from contextlib import suppress
from typing import IO, Any

from rich.console import Console

from protocol.plain_text import plain, printable

logger = logging.getLogger(__name__)

LONGEST_LINE = 2000  # of a log


def abandon(stream: IO[Any]) -> None:
    """Let all that is written to `stream` from now on vanish, and what is in its buffer."""
    with suppress(OSError, ValueError):  # it has no descriptor, or none any more
        null = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(null, stream.fileno())
        finally:
            os.close(null)


class LastingConsole(Console):
    """A daemon that cannot show a line goes on."""

    _failing = False

    def print(self, *objects: Any, **options: Any) -> None:
        """As rich's. What cannot be written is lost, which is logged once."""
        try:
            super().print(*objects, **options)
            self._failing = False
        except OSError as error:
            self._lost(error)

    def on_broken_pipe(self) -> None:
        """Nobody reads any more. Rich would end the process here."""
        self.quiet = True
        abandon(self.file)
        self._lost(BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE)))

    def write(self, text: str) -> None:
        """Write `text` as it is."""
        try:
            self.file.write(text)
            self.file.flush()
        except BrokenPipeError:
            self.on_broken_pipe()
        except OSError as error:
            self._lost(error)

    def _lost(self, error: OSError) -> None:
        if not self._failing:
            logger.warning("the output cannot be written: %s; the work goes on", error)
        self._failing = True


class LastingHandler(logging.StreamHandler[IO[str]]):
    """Log lines to the standard error, for as long as somebody reads it."""

    def handleError(self, record: logging.LogRecord) -> None:
        """A line could not be written."""
        if isinstance(sys.exc_info()[1], BrokenPipeError):
            abandon(self.stream)
        elif not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)  # a mistake in the call that logs


class PlainFormatter(logging.Formatter):
    """A log line holds nothing that a terminal obeys, whatever a message quotes; of a traceback the lines stay."""

    def format(self, record: logging.LogRecord) -> str:
        """As logging's."""
        return printable(super().format(record))

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The line of the record itself: one, however many its message has."""
        return plain(super().formatMessage(record), LONGEST_LINE)


console = LastingConsole(highlight=False)
error_console = LastingConsole(stderr=True, highlight=False)


def say(text: str) -> None:
    """One line on the standard output, at once also when it is piped."""
    console.print(printable(text), markup=False, soft_wrap=True)


def complain(text: str) -> None:
    """One line on the standard error."""
    error_console.print(printable(text), markup=False, soft_wrap=True)
