"""What to do about a run's input that is missing or wrong: each command has its own answer.

Below the commands nobody knows whose path it is that leads nowhere: the researcher's, who wrote it into the run's
file, or a volunteer's, whose machine has the same text elsewhere. So an InputError says what is wrong, and the command
in which it appears says what to do, in its own options and in no other's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from protocol.errors import InputError, UserError

Remedy = Callable[[InputError], str]

_FIELDS = {"data": "data.path", "tokenizer": "data.tokenizer", "basis": "boundary.basis_path"}


@contextmanager
def remedied(remedy: Remedy) -> Iterator[None]:
    """Let an InputError of the block end with what `remedy` says."""
    try:
        yield
    except InputError as error:
        raise UserError(f"{error.fact}; {remedy(error)}") from error


def of_run(file: Path | None, resumed: bool) -> Remedy:
    """The remedies of a command that opens the run in `file`, or goes on with one."""
    return of_resumed_run if resumed else of_new_run(file)


def of_new_run(file: Path | None) -> Remedy:
    """Those of a command that opens the run that `file` describes: its user can change all of it."""

    def remedy(error: InputError) -> str:
        if error.problem == "missing":
            return f"correct {_FIELDS[error.what]} in {file}"
        return error.remedy

    return remedy


def of_resumed_run(error: InputError) -> str:
    """Those of a command that goes on with a run: what it was begun with must be there again."""
    if error.problem == "missing":
        return "the run was begun with it: put it back there, or start this where the run was begun"
    return "the run was begun with another: put that back, or begin a new run"


def of_launched(error: InputError) -> str:
    """Those of a process of `launch` that comes after the coordinator, which found all in order."""
    return f"the run was opened with it: leave {_FIELDS[error.what]} as it is while the run goes on"


def of_volunteer(data: Path | None, tokenizer: Path | None, basis: Path | None) -> Remedy:
    """Those of `peer join`, given where its user said that things are."""
    given = {"data": data, "tokenizer": tokenizer, "basis": basis}

    def remedy(error: InputError) -> str:
        option = f"--{error.what}"
        if error.problem == "unneeded":
            return f"leave {option} out"
        if error.problem != "missing":
            return f"copy the coordinator's, and give its place with {option}"
        if given[error.what] is not None:
            return f"correct {option}"
        return f"that path is the run's researcher's: give its place on this machine with {option}"

    return remedy
