"""A message names only options and commands that exist, and that its reader has in the command he typed."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from peers.basis_file import load_basis
from peers.cli.app import app
from peers.cli.remedies import of_launched, of_new_run, of_resumed_run, of_run, of_volunteer, remedied
from peers.opening import load_data
from protocol.config import RunConfig, parse_config
from protocol.errors import InputError, UserError
from protocol.manifest import Manifest, check_data, check_given_basis

ROOT = Path(__file__).resolve().parents[2]
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
# What a message tells its reader to type: a command of ours with what follows it in the same breath.
TYPED = re.compile(r"isthmus (launch|coordinator start|peer join|status)((?:\s+[^\s,;:`]+)*)")
# A sentence that sends its reader to another program.
ELSEWHERE = re.compile(r"(?:scripts/\w+|python -m|sudo) .*")


def _commands() -> dict[str, Any]:
    found: dict[str, Any] = {}

    def collect(command: Any, name: str) -> None:
        children = getattr(command, "commands", None)
        if children is None:
            found[name] = command
        for sub, child in (children or {}).items():
            collect(child, f"{name} {sub}".strip())

    collect(typer.main.get_command(app), "")
    return found


COMMANDS = _commands()
OPTIONS = {
    name: {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    | {"--help"}
    for name, command in COMMANDS.items()
}
ALL_OPTIONS = set().union(*OPTIONS.values())

# Where messages with options may stand, and in which commands they can appear. All else names none: what only the
# command can know is left to it (peers.cli.remedies).
STARTS = {"launch", "coordinator start"}
SPEAKS_IN: dict[tuple[str, str], set[str]] = {
    ("peers/cli/common.py", "held_folder"): {"peer join"},
    ("peers/cli/coordinator.py", "choose"): STARTS,
    ("peers/cli/coordinator.py", "open_run"): STARTS,
    ("peers/cli/coordinator.py", "_check_wait_for"): {"coordinator start"},
    ("peers/cli/coordinator.py", "_why_here"): {"coordinator start"},
    ("peers/cli/coordinator.py", "_way_on"): {"launch"},  # the end of a command to type
    ("peers/cli/launch.py", "_check"): {"launch"},
    ("peers/cli/launch.py", "_lab"): {"launch"},
    ("peers/cli/peer.py", "choose_device"): {"launch", "peer join"},
    ("peers/lab/meeting.py", "check_meeting"): {"launch"},
    ("peers/reachability.py", "_tell"): {"peer join"},
    ("peers/run_folder.py", "refuse_existing"): STARTS,
    ("peers/run_folder.py", "open"): STARTS,
    ("peers/trace.py", "read_trace"): {"launch", "peer join"},
}


def _text(node: ast.AST) -> str | None:
    """The text of a string, with {} for what is put into it."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
    return None


def _strings(node: ast.AST, function: str = "") -> Iterator[tuple[str, str]]:
    """(function, text) of each string below `node` that is no docstring."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Expr) and _text(child.value) is not None:
            continue
        inside = child.name if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)) else function
        if (text := _text(child)) is not None:
            yield inside, text
        else:
            yield from _strings(child, inside)


def _messages() -> Iterator[tuple[str, str, str]]:
    """(file, function, text) of each string of the packages, without those that are an option and nothing else."""
    for package in ("compression", "protocol", "peers"):
        for path in sorted((ROOT / package).rglob("*.py")):
            for function, text in _strings(ast.parse(path.read_text())):
                if not OPTION.fullmatch(text):
                    yield path.relative_to(ROOT).as_posix(), function, text


MESSAGES = list(_messages())


def test_messages_name_options_that_their_readers_have() -> None:
    found: set[tuple[str, str]] = set()
    for file, function, text in MESSAGES:
        # What is typed after a command of ours is that command's, see below; app.py's texts are its options' own.
        options = OPTION.findall(TYPED.sub("", ELSEWHERE.sub("", text)))
        if not options or file == "peers/cli/app.py":
            continue
        assert (file, function) in SPEAKS_IN, f"{file}, {function}: {text!r} names {options}: in which command?"
        for command in SPEAKS_IN[file, function]:
            assert set(options) <= OPTIONS[command], f"{file}, {function}: {text!r} can appear in `isthmus {command}`"
        found.add((file, function))
    assert found == set(SPEAKS_IN)


def test_commands_in_messages_exist_with_their_options() -> None:
    typed = [(text, *found) for _, _, text in MESSAGES for found in TYPED.findall(text)]
    assert len(typed) >= 5
    for text, command, rest in typed:
        assert set(OPTION.findall(rest)) <= OPTIONS[command], text
    for file, _, text in MESSAGES:
        for name in re.findall(r"isthmus ([a-z]+(?: [a-z]+)?)", text):
            known = any(command == name or command == name.split()[0] for command in COMMANDS)
            assert known or not text.startswith("isthmus "), f"{file}: {text!r}"


def test_arguments_that_we_pass_to_ourselves_exist() -> None:
    for path in (ROOT / "peers").rglob("*.py"):
        for _, text in _strings(ast.parse(path.read_text())):
            if OPTION.fullmatch(text) and "lab/" not in path.as_posix():
                assert text in ALL_OPTIONS, f"{path}: {text}"


@pytest.mark.parametrize(
    "package", sorted(path.parent.name for path in (ROOT / "scripts").glob("*/__init__.py")), ids=lambda name: str(name)
)
def test_messages_of_the_scripts_name_options_that_they_declare(package: str) -> None:
    """An option of a script is a parameter of one of its functions, or spelt out where it is declared."""
    trees = {path: ast.parse(path.read_text()) for path in (ROOT / "scripts" / package).glob("*.py")}
    strings = [(path, text) for path, tree in trees.items() for _, text in _strings(tree)]
    names = {node.arg for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.arg)}
    declared = {f"--{name.replace('_', '-')}" for name in names} | ALL_OPTIONS
    declared |= {text for _, text in strings if OPTION.fullmatch(text)}
    for path, text in strings:
        if not text.startswith("--"):  # `git --dirty` and the like are arguments
            assert set(OPTION.findall(ELSEWHERE.sub("", text))) <= declared, f"{path}: {text!r}"


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_a_command_names_its_own_options(name: str) -> None:
    command = COMMANDS[name]
    texts = [command.help or "", *(getattr(parameter, "help", None) or "" for parameter in command.params)]
    for text in texts:
        assert set(OPTION.findall(TYPED.sub("", text))) <= OPTIONS[name], text


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))])
def test_pages_show_commands_that_exist(page: str) -> None:
    for command, rest in TYPED.findall((ROOT / page).read_text()):
        for option in OPTION.findall(rest.split("|")[0]):
            assert option in OPTIONS[command], f"{page}: isthmus {command}{rest}"


VOICES = {
    "launch": of_new_run(Path("RUN.toml")),
    "coordinator start": of_run(Path("RUN.toml"), resumed=False),
    "launch --resume": of_run(None, resumed=True),
    "coordinator start --resume": of_resumed_run,
    "peer join": of_volunteer(None, None, None),
    "peer join --data": of_volunteer(Path("a"), Path("b"), Path("c")),
    "launch, its peers": of_launched,
}
PROBLEMS = ("missing", "differs", "unfit", "unneeded")


def errors() -> list[InputError]:
    """One of each kind that the packages raise."""
    return [
        InputError(what, problem, "expected this, but got that", "do so")  # type: ignore[arg-type]
        for what in ("data", "tokenizer", "basis")
        for problem in PROBLEMS
    ]


@pytest.mark.parametrize("voice", VOICES)
@pytest.mark.parametrize("error", errors(), ids=lambda error: f"{error.what} {error.problem}")
def test_a_remedy_names_options_of_its_command(voice: str, error: InputError) -> None:
    command = " ".join(voice.split(",")[0].split(" --")[0].split())
    with pytest.raises(UserError) as caught, remedied(VOICES[voice]):
        raise error
    said = str(caught.value)
    assert said.startswith("expected this, but got that; ") and len(said) > 32
    assert caught.value.exit_code == 2
    assert set(OPTION.findall(said)) <= OPTIONS[command]
    if command == "peer join":
        assert f"--{error.what}" in said


def text_run(path: Path, **data: str) -> RunConfig:
    return parse_config({"data": {"source": "text", "path": str(path), **data}}, "test")


def told(voice: str, config: RunConfig, *elsewhere: Path | None) -> str:
    with pytest.raises(UserError) as caught, remedied(VOICES[voice]):
        load_data(config, *elsewhere)
    return str(caught.value)


@pytest.mark.parametrize(
    ("voice", "remedy"),
    [
        ("launch", "; correct data.path in RUN.toml"),
        ("launch --resume", "; the run was begun with it: put it back there, or start this where the run was begun"),
        ("peer join", "; that path is the run's researcher's: give its place on this machine with --data"),
        ("peer join --data", "; correct --data"),
        ("launch, its peers", "; the run was opened with it: leave data.path as it is while the run goes on"),
    ],
)
def test_a_missing_text_is_everybodys_own_affair(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, voice: str, remedy: str
) -> None:
    monkeypatch.setenv("ISTHMUS_CACHE", str(tmp_path / "cache"))
    assert told(voice, text_run(tmp_path / "gone")).endswith(remedy)
    (tmp_path / "a.txt").write_text("a text of some length. " * 50)
    said = told(voice, text_run(tmp_path / "a.txt", tokenizer=str(tmp_path / "gone.json")))
    assert said.endswith(remedy.replace("data.path", "data.tokenizer").replace("--data", "--tokenizer"))


def test_without_a_command_a_message_names_no_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ISTHMUS_CACHE", str(tmp_path / "cache"))
    manifest = Manifest(text_run(tmp_path), "a" * 64, 2.3, "k", "n", "b" * 64)
    basis = parse_config({"boundary": {"basis": "file", "basis_path": str(tmp_path / "gone.npy")}}, "test")
    for fails in (
        lambda: check_data(manifest, "c" * 64),
        lambda: check_given_basis(manifest, None),
        lambda: load_data(text_run(tmp_path / "gone")),
        lambda: load_data(RunConfig(), data=tmp_path),
        lambda: load_data(RunConfig(), tokenizer=tmp_path),
        lambda: load_basis(basis),
        lambda: load_basis(RunConfig(), tmp_path),
    ):
        with pytest.raises(InputError) as caught:
            fails()
        assert not OPTION.findall(str(caught.value))


def test_what_a_volunteer_brings_in_vain_is_not_ignored(tmp_path: Path) -> None:
    """A run on the standard library took any --data without a word."""
    assert told("peer join", RunConfig(), tmp_path).endswith("the run's text is stdlib; leave --data out")
    said = told("peer join", RunConfig(), None, tmp_path)
    assert said.endswith("the run's tokenizer is trained on its text; leave --tokenizer out")


def test_the_check_itself_can_fail() -> None:
    tree = ast.parse('def f(x):\n    """Says --nothing."""\n    raise E(f"give {x} with --dta, " "or --dir")')
    assert list(_strings(tree)) == [("f", "give {} with --dta, or --dir")]
    assert "--dta" not in ALL_OPTIONS and OPTION.findall("with --dta, or --dir") == ["--dta", "--dir"]
