"""Which files of a folder are read, through which links, and what is said of the others."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from peers.data.folder_files import find_files
from peers.data.sources import load_documents, stdlib_files
from protocol.errors import UserError


def put(file: Path, content: str | None = None) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(file.name if content is None else content)
    return file


def loaded(folder: Path) -> tuple[list[str], str]:
    told: list[str] = []
    documents = load_documents("text", folder, say=told.append)
    assert len(told) == 1
    return documents, told[0]


def test_linked_folders_are_read(tmp_path: Path) -> None:
    put(tmp_path / "elsewhere/deep/b.txt")
    put(tmp_path / "data/c.txt")
    (tmp_path / "data/a").symlink_to(tmp_path / "elsewhere")
    assert loaded(tmp_path / "data")[0] == ["b.txt", "c.txt"]


def test_a_folder_is_read_once_however_many_links_lead_there(tmp_path: Path) -> None:
    put(tmp_path / "data/b/x.txt")
    put(tmp_path / "elsewhere/y.txt")
    for name in ("a", "c"):
        (tmp_path / "data" / name).symlink_to("b")
        (tmp_path / "data" / f"{name}{name}").symlink_to(tmp_path / "elsewhere")
    documents, told = loaded(tmp_path / "data")
    assert documents == ["y.txt", "x.txt"]  # aa/y.txt, then b/x.txt: real folders keep their own names
    assert "folders read under another name 3" in told


def test_links_that_lead_round_are_no_loop(tmp_path: Path) -> None:
    put(tmp_path / "data/sub/x.txt")
    (tmp_path / "data/sub/up").symlink_to(tmp_path / "data")
    (tmp_path / "data/here").symlink_to(".")
    put(tmp_path / "other/y.txt")
    (tmp_path / "other/back").symlink_to(tmp_path / "data")
    (tmp_path / "data/other").symlink_to(tmp_path / "other")
    assert sorted(loaded(tmp_path / "data")[0]) == ["x.txt", "y.txt"]


def test_the_order_does_not_depend_on_the_order_of_the_names_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("b/1.txt", "a/2.txt", "c/d/3.txt", "0.txt"):
        put(tmp_path / "data" / name)
    for name in ("z", "m", "b/k"):
        put(tmp_path / "elsewhere" / name.replace("/", "-") / f"{name[-1]}.txt")
        (tmp_path / "data" / name).symlink_to(tmp_path / "elsewhere" / name.replace("/", "-"))
    expected = loaded(tmp_path / "data")
    listdir = os.listdir
    monkeypatch.setattr(os, "listdir", lambda path: sorted(listdir(path), reverse=True))
    assert loaded(tmp_path / "data") == expected


def test_the_data_itself_may_be_a_link(tmp_path: Path) -> None:
    put(tmp_path / "data/x.txt")
    (tmp_path / "link").symlink_to("data")
    assert loaded(tmp_path / "link")[0] == ["x.txt"]
    (tmp_path / "file").symlink_to("data/x.txt")
    assert loaded(tmp_path / "file")[0] == ["x.txt"]


@pytest.mark.parametrize("name", ["data", "data/x.txt", "data/folder"])
def test_a_link_that_leads_nowhere_is_named(tmp_path: Path, name: str) -> None:
    if name != "data":
        put(tmp_path / "data/a.txt")
    (tmp_path / name).symlink_to("gone")
    with pytest.raises(UserError) as caught:
        load_documents("text", tmp_path / "data")
    expected = (
        f"expected data at {tmp_path / name}, but it is a link to gone, where nothing is; mend the link, or remove it"
    )
    assert str(caught.value) == expected


@pytest.mark.parametrize("name", ["data", "data/x.txt"])
def test_a_link_to_itself_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "data").mkdir() if name != "data" else None
    (tmp_path / name).symlink_to(tmp_path / name)
    with pytest.raises(UserError, match="but it is a link that leads back to itself; mend the link"):
        load_documents("text", tmp_path / "data")


def test_what_is_passed_over_is_told(tmp_path: Path) -> None:
    for name in (
        "a.txt",
        "b.csv",
        "c.csv",
        "d.PNG",
        "Makefile",
        ".hidden.txt",
        ".git/objects/e.txt",
        "__pycache__/f.py",
    ):
        put(tmp_path / name)
    put(tmp_path / "empty.txt", "")
    (tmp_path / "g.png").symlink_to("gone")  # no text by its name, so nobody misses it
    documents, told = loaded(tmp_path)
    assert documents == ["a.txt"]
    assert told.startswith(f"data in {tmp_path}: 2 files, 5 characters; passed over: ")
    for part in ("hidden 2", "folders never read 1", "other endings 5 (", ".csv 2", ".png 2", "empty 1"):
        assert part in told, told
    assert "no ending 1" in told


def test_where_no_file_fits_the_message_says_what_is_there(tmp_path: Path) -> None:
    for name in ("a.txt.gz", "b.txt.gz", "c.parquet"):
        put(tmp_path / name)
    with pytest.raises(UserError, match=r"found none \(passed over: other endings 3 \(.gz 2, .parquet 1\)\)"):
        load_documents("text", tmp_path)


def test_pipes_and_sockets_are_never_opened(tmp_path: Path) -> None:
    """Opening a pipe waits for a writer, for ever."""
    os.mkfifo(tmp_path / "a.txt")
    put(tmp_path / "b.txt")
    documents, told = loaded(tmp_path)
    assert documents == ["b.txt"] and "no regular file 1" in told
    with pytest.raises(UserError, match="but it is a device, a pipe or a socket"):
        load_documents("text", tmp_path / "a.txt")
    with pytest.raises(UserError, match="but it is a device, a pipe or a socket"):
        load_documents("text", Path("/dev/zero"))


@pytest.mark.parametrize("name", ["x\0y", "x" * 5000, "a.txt/b"])
def test_names_that_no_file_can_have(tmp_path: Path, name: str) -> None:
    put(tmp_path / "a.txt")
    with pytest.raises(UserError, match=r"nothing is there|File name too long; use a shorter path"):
        load_documents("text", tmp_path / name)


def test_the_systems_refusals_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """root may read everything, so the refusals are made up."""
    put(tmp_path / "sub/a.txt")

    def refuse(error: OSError) -> None:
        def fail(path: object, *_: object) -> None:
            raise error.__class__(error.errno, error.strerror, str(path))

        monkeypatch.setattr(os, "listdir", fail)

    refuse(PermissionError(13, "Permission denied"))
    with pytest.raises(UserError, match=rf"read {tmp_path}, but .*: Permission denied; give yourself the right"):
        load_documents("text", tmp_path)
    refuse(OSError(5, "Input/output error"))
    with pytest.raises(UserError, match=r"Input/output error; the disk or the share that it is on fails"):
        load_documents("text", tmp_path)
    monkeypatch.undo()
    monkeypatch.setattr(Path, "open", lambda path, *_: (_ for _ in ()).throw(PermissionError(13, "denied", str(path))))
    with pytest.raises(UserError, match=rf"read {tmp_path}/sub/a.txt, but the system refuses: denied; give yourself"):
        load_documents("text", tmp_path)


def test_the_standard_library_is_read_without_linked_folders(tmp_path: Path) -> None:
    """Distributions link folders of their own into it."""
    put(tmp_path / "elsewhere/x.py")
    put(tmp_path / "lib/a.py")
    (tmp_path / "lib/linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "lib/gone").symlink_to("nowhere")
    assert [file.name for file in stdlib_files(tmp_path / "lib")] == ["a.py"]


def test_a_socket_is_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    put(tmp_path / "a.txt")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("s.txt")
        found = find_files(tmp_path, lambda name: name.endswith(".txt"), lambda _: True)
    assert [file.name for file in found.files] == ["a.txt"] and found.passed_over["no regular file"] == 1
