"""Errors by who caused them.

A local error is our user's mistake or our own failure; it ends a command with an exit code. A remote error is another
peer's: what it sent is refused. Only a neighbour's tensor ends a run so, for a run of one peer a stage cannot go on
without that neighbour. Every message says what was expected, what came and what to do.
"""

from __future__ import annotations

from typing import Literal

from protocol.plain_text import plain

Input = Literal["data", "tokenizer", "basis"]
Problem = Literal["missing", "differs", "unfit", "unneeded"]


class IsthmusError(Exception):
    """Base of every error with a message meant for a person. `exit_code` is what a command that it ends returns."""

    exit_code = 1


class RunFailed(IsthmusError):
    """The run cannot go on: a peer was lost, a state was bad, a number was not finite."""

    exit_code = 1


class NotFinite(RunFailed):
    """A number of `step` is not finite: no replica can apply that step."""

    def __init__(self, step: int, message: str) -> None:
        super().__init__(message)
        self.step = step


class UserError(IsthmusError):
    """The user's mistake: a wrong file, key, value, invite or folder."""

    exit_code = 2


class ConfigError(UserError):
    """A run configuration that cannot be run as written."""


class InputError(UserError):
    """A file that this machine must bring to a run is not what the run needs.

    Whose path it is and which option names it depends on the command: it puts its own remedy (`peers.cli.remedies`) in
    the place of `remedy`, which therefore names no option.

    Attributes:
        what: which of the run's inputs.
        problem: missing; another than the run's; unfit for the run; not needed at all.
        fact: what was expected and what came.
        remedy: what to do about it, for whoever has no command.
    """

    def __init__(self, what: Input, problem: Problem, fact: str, remedy: str) -> None:
        super().__init__(f"{fact}; {remedy}")
        self.what = what
        self.problem = problem
        self.fact = fact
        self.remedy = remedy


class NetworkError(IsthmusError):
    """Nobody answered, or the line broke and did not come back."""

    exit_code = 3


class RemoteError(Exception):
    """Another peer sent what this one must not act on. The message goes back to it as the reason of the refusal.

    It may quote what came, so it is made fit for people here, whoever words it.
    """

    def __init__(self, message: object = "") -> None:
        super().__init__(plain(message))


class BadFrame(RemoteError):
    """A frame that is malformed, too long, of another protocol version, or not for this peer."""


class BadSignature(RemoteError):
    """A signed record whose signature does not match its key."""


class BadPart(RemoteError):
    """A replica's part of a step is not what it must be. `index` is its place among the parts that were given."""

    def __init__(self, index: int, message: str) -> None:
        super().__init__(message)
        self.index = index
