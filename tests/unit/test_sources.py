"""Where text comes from, and what is said when it does not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from peers.data.sources import load_documents, stdlib_files
from protocol.errors import UserError


def put(file: Path, content: str | bytes) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return file


def test_the_standard_library_comes_without_tests() -> None:
    names = [file.as_posix() for file in stdlib_files()]
    assert len(names) > 300
    assert any(name.endswith("/dataclasses.py") for name in names)
    for part in ("/test/", "/tests/", "/idle_test/", "/site-packages/", "__pycache__", "_sysconfigdata"):
        assert not [name for name in names if part in name.split("/lib/", 1)[-1]]


def test_the_standard_library_has_documents() -> None:
    documents = load_documents("stdlib", None)
    assert len(documents) > 300 and all(documents)
    assert any("class OrderedDict" in text for text in documents)


def test_stdlib_files_skip_what_differs_between_machines(tmp_path: Path) -> None:
    for name in ("b.py", "a/c.py", "a.py", "test/x.py", "a/tests/x.py", "lib2to3/tests/x.py", "idlelib/idle_test/x.py"):
        put(tmp_path / name, "x")
    for name in ("site-packages/x.py", "_sysconfigdata__linux.py", "config-3.11/x.py", "sitecustomize.py", "x.txt"):
        put(tmp_path / name, "x")
    assert [file.relative_to(tmp_path).as_posix() for file in stdlib_files(tmp_path)] == ["a.py", "a/c.py", "b.py"]


def test_a_folder_is_walked_in_the_order_of_relative_paths(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.md", "a.py", "B.txt", "skip.bin", ".hidden/x.txt", ".x.txt", "__pycache__/x.py"):
        put(tmp_path / name, name)
    assert load_documents("text", tmp_path) == ["B.txt", "a.py", "a/z.md", "b.txt"]


def test_one_file_may_have_any_suffix_and_any_bytes(tmp_path: Path) -> None:
    assert load_documents("text", put(tmp_path / "book", b"caf\xe9\r\nend")) == ["caf\ufffd\nend"]


def test_empty_files_are_no_documents(tmp_path: Path) -> None:
    put(tmp_path / "a.txt", "")
    put(tmp_path / "b.txt", "text")
    assert load_documents("text", tmp_path) == ["text"]


def test_jsonl_reads_the_field_of_each_line(tmp_path: Path) -> None:
    put(tmp_path / "b.jsonl", '{"body": "three"}')
    put(tmp_path / "a.jsonl", '{"body": "one\\u2028"}\n\n{"body": "two", "text": "no"}\r\n')
    assert load_documents("jsonl", tmp_path, "body") == ["one\u2028", "two", "three"]


def test_half_a_surrogate_pair_in_json_is_replaced(tmp_path: Path) -> None:
    assert load_documents("jsonl", put(tmp_path / "a.jsonl", '{"text": "a\\ud800b"}')) == ["a?b"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{not json", "expected one JSON object, but it does not parse"),
        ("[1]", "expected a JSON object, but got list"),
        (json.dumps({"body": "x", "id": 1}), 'expected a field "text", but the fields are: body, id'),
        ("{}", "the fields are: none"),
        (json.dumps({"text": 3}), 'expected text at "text", but got int'),
        ("[" * 100_000, "does not parse"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    file = put(tmp_path / "a.jsonl", '{"text": "good"}\n' + line + "\n")
    with pytest.raises(UserError) as caught:
        load_documents("jsonl", file)
    assert str(caught.value).startswith(f"{file}, line 2: ")
    assert message in str(caught.value)


def test_a_missing_folder_is_one_clear_sentence(tmp_path: Path) -> None:
    path = tmp_path / "gone"
    with pytest.raises(UserError) as caught:
        load_documents("text", path)
    expected = f"expected a file or a folder of text at {path}, but nothing is there; correct the path"
    assert str(caught.value) == expected


def test_no_path_is_an_error() -> None:
    with pytest.raises(UserError, match='expected a path for the data source "jsonl", but none was given'):
        load_documents("jsonl", None)


def test_a_folder_without_such_files_is_an_error(tmp_path: Path) -> None:
    put(tmp_path / "x.bin", "x")
    with pytest.raises(UserError, match=r"expected files such as \*\.jsonl in .* but found none"):
        load_documents("jsonl", tmp_path)


def test_a_source_of_empty_files_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="all of it is empty"):
        load_documents("text", put(tmp_path / "a.txt", ""))


def test_an_unknown_kind_suggests_the_nearest() -> None:
    with pytest.raises(UserError, match='out of stdlib, text, jsonl, but got "jsnol"; did you mean "jsonl"'):
        load_documents("jsnol", None)


def lines(tmp_path: Path, good: int, *bad: str) -> Path:
    return put(tmp_path / "a.jsonl", "".join(f"{line}\n" for line in [*['{"text": "good"}'] * good, *bad]))


def test_all_bad_lines_are_counted_by_what_is_wrong_with_them(tmp_path: Path) -> None:
    file = lines(tmp_path, 5, "{", "[1]", "[2]", '{"body": 1}', '{"text": null}', '{"text": 3}', '{"text": 4}')
    with pytest.raises(UserError) as caught:
        load_documents("jsonl", file)
    message = str(caught.value)
    assert message.startswith(f"{file}, line 6: expected one JSON object, but it does not parse")
    assert "(7 of 12 lines are bad: no text in the field 3, no JSON object 2, " in message
    assert "not JSON 1, without the field 1)" in message and message.endswith("; mend the line")


@pytest.mark.parametrize(("good", "refused"), [(998, True), (999, False)])
def test_one_bad_line_in_a_thousand_is_left_out(tmp_path: Path, good: int, refused: bool) -> None:
    """A writer that was killed leaves half a line behind."""
    file, told = lines(tmp_path, good, '{"text": "cut o'), []
    if refused:
        with pytest.raises(UserError, match=rf"line {good + 1}: expected one JSON object"):
            load_documents("jsonl", file)
        return
    assert load_documents("jsonl", file, say=told.append) == ["good"] * good
    assert len(told) == 2 and told[1].startswith("warning: lines left out: not JSON 1; the first: ")
    assert f"{file}, line 1000: " in told[1]


def test_the_field_is_the_researchers_to_set(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"the fields are: body; set data\.field to the one with the text"):
        load_documents("jsonl", put(tmp_path / "a.jsonl", '{"body": "x"}'))


def test_a_json_array_is_no_file_of_lines(tmp_path: Path) -> None:
    file = put(tmp_path / "a.jsonl", json.dumps([{"text": "a"}, {"text": "b"}], indent=1))
    with pytest.raises(UserError, match=r"one JSON array, make lines of it: jq -c"):
        load_documents("jsonl", file)


def test_what_was_read_is_told(tmp_path: Path) -> None:
    told: list[str] = []
    file = put(tmp_path / "a.jsonl", '{"text": "a\\ud800b"}\n{"text": ""}\n')
    assert load_documents("jsonl", file, say=told.append) == ["a?b"]
    assert told[0] == f"data in {file}: 1 file, 34 characters; passed over: empty 1"
    assert told[1].startswith("warning: 1 of 34 characters (2.9 %) are not text")
    told.clear()
    load_documents("stdlib", None, say=told.append)
    assert told == []


def test_a_relative_path_is_said_with_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=rf"of text at gone \(from {tmp_path}\), but nothing is there"):
        load_documents("text", Path("gone"))
