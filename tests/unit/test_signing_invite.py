"""What strangers can check: signed records, the invite, the manifest."""

from __future__ import annotations

import base64
import hashlib
import json
from dataclasses import replace
from typing import Any

import pytest

from peers.cli.remedies import of_volunteer, remedied
from protocol.config import RunConfig, parse_config
from protocol.errors import BadSignature, RemoteError, UserError
from protocol.invite import Invite
from protocol.manifest import Manifest, check_data
from protocol.records import MANIFEST, PROGRESS, VIEW, is_coordinators, read_record, record_key, sign_record
from protocol.signing import MAX_RECORD_BYTES, SigningKey, open_record

KEY, OTHER = SigningKey(bytes(range(32))), SigningKey(bytes(32))
BODY: dict[str, Any] = {"number": 3, "loss": 0.1, "name": "Zoë", "stages": [["a", None, True]]}


def changed(record: bytes, **fields: Any) -> bytes:
    return json.dumps({**json.loads(record), **fields}).encode()


# Records


def test_a_record_opens_with_its_key_and_kind() -> None:
    assert open_record(KEY.sign(VIEW, BODY), VIEW, KEY.public) == BODY


def test_a_key_is_its_secret() -> None:
    assert SigningKey(KEY.secret).public == KEY.public != OTHER.public
    assert SigningKey.generate().public != SigningKey.generate().public


def test_the_signature_is_pinned() -> None:
    """Releases must agree on the signed bytes: a change here needs a new protocol version."""
    record = json.loads(KEY.sign("view", {"b": 1, "a": [2.5]}))
    message = b'["view",{"a":[2.5],"b":1}]'
    assert bytes.fromhex(record["signature"]) == KEY._private.sign(message)


def test_white_space_and_key_order_do_not_break_a_signature() -> None:
    record = json.loads(KEY.sign(VIEW, BODY))
    reordered = {name: record[name] for name in reversed(record)}
    reordered["body"] = {name: BODY[name] for name in reversed(BODY)}
    assert open_record(json.dumps(reordered, indent=3).encode(), VIEW, KEY.public) == BODY


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (OTHER.sign(VIEW, BODY), "expected a view signed by .* got a view by"),
        (KEY.sign(MANIFEST, BODY), "expected a view signed by .* got a manifest by"),
        (changed(KEY.sign(MANIFEST, BODY), kind=VIEW), "the view's signature does not match its content"),
        (changed(OTHER.sign(VIEW, BODY), key=KEY.public), "signature does not match"),
        (changed(KEY.sign(VIEW, BODY), body={**BODY, "number": 4}), "signature does not match"),
        (changed(KEY.sign(VIEW, BODY), body={**BODY, "extra": 1}), "signature does not match"),
        (changed(KEY.sign(VIEW, BODY), signature="00" * 64), "signature does not match"),
        (changed(KEY.sign(VIEW, BODY), signature="00"), "signature does not match"),
        (changed(KEY.sign(VIEW, BODY), signature="zz"), "expected a signed record"),
        (changed(KEY.sign(VIEW, BODY), signature=5), "expected a signed record"),
        (KEY.sign(VIEW, BODY)[:-1], "expected a signed record"),
        (KEY.sign(VIEW, [1]), "an object as its body"),  # type: ignore[arg-type]
        (b"", "expected a signed record"),
        (b"\xff" * 40, "expected a signed record"),
        (b"[]", "expected a signed record"),
        (b"{}", "expected a signed record"),
        (b"[" * 100_000, "expected a signed record"),
        (b" " * (MAX_RECORD_BYTES + 1), f"at most {MAX_RECORD_BYTES} bytes, got {MAX_RECORD_BYTES + 1}"),
    ],
    ids=range(18),
)
def test_whatever_is_not_the_coordinators_is_refused_with_the_reason(record: bytes, message: str) -> None:
    with pytest.raises(BadSignature, match=message):
        open_record(record, VIEW, KEY.public)


def test_a_record_is_refused_at_every_depth_of_nesting() -> None:
    """Python's parser and printer give up at different depths; neither may be a stranger's way to crash a peer."""
    for depth in range(800, 1010):
        body = "[" * depth + "]" * depth
        record = f'{{"kind":"view","body":{body},"key":"{KEY.public}","signature":"00"}}'.encode()
        assert not is_coordinators(record_key("run-1", VIEW), record, 1.0, KEY.public)


def test_every_changed_bit_of_a_record_is_noticed() -> None:
    record = KEY.sign(VIEW, {"number": 3})
    for place in range(len(record)):
        for bit in range(8):
            flipped = bytearray(record)
            flipped[place] ^= 1 << bit
            try:
                body = open_record(bytes(flipped), VIEW, KEY.public)
            except BadSignature:
                continue
            assert body == {"number": 3}, "only a change that means the same may pass (a hexadecimal digit's case)"


def test_dht_records_are_the_coordinators_and_under_their_own_name() -> None:
    key = record_key("run-1", VIEW)
    assert key == "isthmus/run-1/view"
    record = sign_record(KEY, VIEW, BODY, expires=1000.0)
    assert read_record(record, VIEW, KEY.public) == BODY
    assert is_coordinators(key, record, 1000.0, KEY.public)
    assert not is_coordinators(key, sign_record(OTHER, VIEW, BODY, 1000.0), 1000.0, KEY.public)
    assert not is_coordinators(record_key("run-1", PROGRESS), record, 1000.0, KEY.public)
    assert not is_coordinators(key, b"junk", 1000.0, KEY.public)
    assert not is_coordinators(key, KEY.sign(VIEW, BODY), 1000.0, KEY.public)


def test_an_old_dht_record_cannot_be_made_to_last() -> None:
    record = sign_record(KEY, VIEW, BODY, expires=1000.0)
    assert is_coordinators(record_key("run-1", VIEW), record, 1004.0, KEY.public), "clocks differ a little"
    assert not is_coordinators(record_key("run-1", VIEW), record, 1600.0, KEY.public)


# The invite

INVITE = Invite("tiny-0123456789ab", KEY.public, ("/ip4/10.0.0.1/tcp/31337/p2p/12D3Koo", "/dns/é.example/tcp/1"))


def encoded(value: Any) -> str:
    """An invite with a right checksum that carries `value`."""
    return checked(json.dumps(value))


def checked(text: str) -> str:
    """An invite with a right checksum that carries `text`."""
    body = base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")
    return f"isthmus1.{body}.{hashlib.sha256(body.encode()).hexdigest()[:8]}"


@pytest.mark.parametrize("padding", range(4))
def test_an_invite_survives_whatever_its_length(padding: int) -> None:
    invite = replace(INVITE, run_id="r" * padding + INVITE.run_id)
    assert Invite.parse(str(invite)) == invite
    assert not set(str(invite)) & set("+/= '\"")


def test_an_invite_survives_a_mail_program() -> None:
    text = str(INVITE)
    assert Invite.parse(f"  {text[:40]}\r\n {text[40:90]}\n{text[90:]}\n") == INVITE


def test_every_cut_and_every_changed_letter_is_noticed() -> None:
    text = str(INVITE)
    for end in range(len(text)):
        with pytest.raises(UserError):
            Invite.parse(text[:end])
    for place in range(len(text)):
        with pytest.raises(UserError):
            Invite.parse(text[:place] + ("a" if text[place] != "a" else "b") + text[place + 1 :])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected an invite that starts with 'isthmus1.', got ''"),
        ("hello", "got 'hello': copy the whole line that `isthmus coordinator start` printed"),
        (str(INVITE).replace("isthmus1", "isthmus2"), "expected an invite that starts with 'isthmus1.'"),
        (str(INVITE).rsplit(".", 1)[0], "expected an invite that starts with"),
        (str(INVITE)[:-1], "cut or changed on its way .* copy the whole line again"),
        (encoded(7), "cannot be read by this release of isthmus: ask for a new one"),
        (encoded(["run", "key"]), "cannot be read by this release"),
        (encoded(["run", "key", 5]), "cannot be read by this release"),
        (checked("[" * 100_000 + "]" * 100_000), "cannot be read by this release"),
    ],
)
def test_a_bad_invite_says_what_to_do(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Invite.parse(text)


# The manifest

MANIFEST_OF_DEFAULTS = Manifest(RunConfig(), "ab" * 32, 7.0123456789012345, KEY.public, "nonce", None)


def test_a_manifest_survives_signing_and_keeps_its_id() -> None:
    record = KEY.sign(MANIFEST, MANIFEST_OF_DEFAULTS.to_json())
    back = Manifest.from_json(open_record(record, MANIFEST, KEY.public))
    assert back == MANIFEST_OF_DEFAULTS and back.run_id == MANIFEST_OF_DEFAULTS.run_id


def test_a_manifest_of_every_kind_of_value_survives_json() -> None:
    values = {
        "name": "all-9",
        "seed": (1 << 63) - 1,
        "train": {"learning_rate": 1, "final_learning_rate": 0, "epsilon": 1e-300},
        "data": {"source": "text", "path": "books/é"},
        "boundary": {"form": "none"},
    }
    manifest = replace(MANIFEST_OF_DEFAULTS, config=parse_config(values, "here"))
    assert Manifest.from_json(json.loads(json.dumps(manifest.to_json()))) == manifest


def test_a_run_id_is_its_name_and_changes_with_everything_that_fixes_the_run() -> None:
    variants = [
        MANIFEST_OF_DEFAULTS,
        replace(MANIFEST_OF_DEFAULTS, config=RunConfig(seed=1)),
        replace(MANIFEST_OF_DEFAULTS, config=parse_config({"train": {"learning_rate": 0.0031}}, "here")),
        replace(MANIFEST_OF_DEFAULTS, data_fingerprint="cd" * 32),
        replace(MANIFEST_OF_DEFAULTS, unigram_loss=7.0),
        replace(MANIFEST_OF_DEFAULTS, coordinator_key=OTHER.public),
        replace(MANIFEST_OF_DEFAULTS, nonce="other"),
        replace(MANIFEST_OF_DEFAULTS, protocol_version=3),
    ]
    ids = [manifest.run_id for manifest in variants]
    assert len(set(ids)) == len(ids)
    assert all(run_id.startswith("run-") and len(run_id) == 16 for run_id in ids)
    assert replace(MANIFEST_OF_DEFAULTS, config=RunConfig(name="mine")).run_id.startswith("mine-")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"protocol_version": 3}, "the run speaks protocol version 3, this release 2: install the release"),
        ({"config_hash": "00"}, "does not hash to what it claims"),
        ({"config": {**RunConfig().model_dump(), "seed": 5}}, "does not hash to what it claims"),
        ({"config": {**RunConfig().model_dump(), "novelty": 5}}, "unknown key 'novelty'"),
        ({"config": None}, "cannot be read by this release"),
        ({"novelty": 5}, "cannot be read by this release"),
    ],
)
def test_a_manifest_of_another_release_is_refused_with_the_reason(change: dict[str, Any], message: str) -> None:
    with pytest.raises(RemoteError, match=message):
        Manifest.from_json({**MANIFEST_OF_DEFAULTS.to_json(), **change})


@pytest.mark.parametrize(
    "change",
    [
        {"unigram_loss": "much"},
        {"unigram_loss": -1.0},
        {"unigram_loss": True},
        {"nonce": "n" * 129},
        {"nonce": 7},
        {"data_fingerprint": None},
        {"data_fingerprint": "\x1b[2J"},
        {"basis_fingerprint": ["a"]},
        {"coordinator_key": {}},
        {"from_step": "1"},
        {"first": "../../escaped\n"},
        {"history": [[1, "h" * 129]]},
    ],
)
def test_what_a_stranger_wrote_into_a_manifest_is_looked_at(change: dict[str, Any]) -> None:
    """It is shown, compared and calculated with: of another type it ended `isthmus status` with a traceback."""
    with pytest.raises(RemoteError, match="cannot be read by this release"):
        Manifest.from_json({**json.loads(json.dumps(MANIFEST_OF_DEFAULTS.to_json())), **change})


@pytest.mark.parametrize("name", sorted(MANIFEST_OF_DEFAULTS.to_json()))
def test_a_manifest_without_a_field_is_refused(name: str) -> None:
    value = MANIFEST_OF_DEFAULTS.to_json()
    del value[name]
    if name == "protocol_version":
        value["protocol_version"] = None
    with pytest.raises(RemoteError):
        Manifest.from_json(value)


def test_reading_a_manifest_leaves_the_value_as_it_was() -> None:
    value = MANIFEST_OF_DEFAULTS.to_json()
    Manifest.from_json(value)
    assert value == MANIFEST_OF_DEFAULTS.to_json()


def test_other_data_is_told_apart_with_a_way_out() -> None:
    check_data(MANIFEST_OF_DEFAULTS, "ab" * 32)
    with pytest.raises(UserError) as caught:
        check_data(MANIFEST_OF_DEFAULTS, "cd" * 32)
    assert "fingerprint abababababababab, got cdcdcdcdcdcdcdcd" in str(caught.value)
    assert "it differs between Python versions" in str(caught.value)
    own = replace(MANIFEST_OF_DEFAULTS, config=parse_config({"data": {"source": "text", "path": "books"}}, "here"))
    with pytest.raises(UserError) as caught, remedied(of_volunteer(None, None, None)):
        check_data(own, "cd" * 32)
    assert "text books" in str(caught.value) and "--data" in str(caught.value)


@pytest.mark.parametrize(
    "run_id",
    [
        "../../escaped",
        "/etc/run-0123456789ab",
        "tiny",
        "tiny-0123456789AB",
        "tiny-0123456789ab/..",
        "a b-0123456789ab",
        "",
    ],
)
def test_an_invite_whose_run_id_is_no_name_of_a_folder_is_refused(run_id: str) -> None:
    """It made folders outside `runs/`."""
    with pytest.raises(UserError, match="do not trust it"):
        Invite.parse(encoded([run_id, KEY.public, list(INVITE.addresses)]))


@pytest.mark.parametrize(
    ("key", "addresses"),
    [("x" * 64, ["/ip4/10.0.0.1/tcp/1"]), (KEY.public, ["/ip4/10.0.0.1/tcp/1"] * 65), (KEY.public, ["/" + "x" * 400])],
)
def test_what_else_a_stranger_writes_into_an_invite_is_bounded(key: str, addresses: list[str]) -> None:
    with pytest.raises(UserError, match="do not trust it"):
        Invite.parse(encoded([INVITE.run_id, key, addresses]))


def test_what_a_stranger_writes_into_an_invite_does_not_reach_the_terminal() -> None:
    with pytest.raises(UserError) as caught:
        Invite.parse(encoded(["\x1b[2J\u202e", KEY.public, list(INVITE.addresses)]))
    assert "\x1b" not in str(caught.value) and "\u202e" not in str(caught.value)
