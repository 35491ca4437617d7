"""A tokenizer made elsewhere: broken in any way it is one clear error, and what it loses of the text is told."""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from peers.data import tokenizer as bpe
from peers.data.given_tokenizer import LEAST_LOST, MOST_LOST, SLICE, SLICES, check_on_text, sample, unknown_id
from peers.data.token_store import prepare
from protocol.errors import UserError

TEXT = "the strip is narrow and each stage writes into the strip\n" * 200


@dataclass(frozen=True)
class Settings:
    path: str | None
    tokenizer: str | None
    source: str = "text"
    field: str = "text"
    vocab_size: int = 400


def words_of(text: str, **known: int) -> dict[str, int]:
    return {bpe.END: 0} | {word: i for i, word in enumerate(sorted(set(text.split())), start=1)} | known


def by_words(text: str, unknown: str | None = None) -> Tokenizer:
    """Knows the words of `text`, and others as its token `unknown`, if it has one."""
    known = words_of(text)
    if unknown is not None:
        known[unknown] = len(known)
    tokenizer = Tokenizer(models.WordLevel(known, unk_token=unknown or "[nowhere]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


def by_characters(letters: str, **model: Any) -> Tokenizer:
    """Knows `letters`, and drops all else unless `model` says otherwise."""
    known = {bpe.END: 0} | {letter: i for i, letter in enumerate(letters, start=1)}
    for name in ("unk_token",):
        if name in model:
            known[model[name]] = len(known)
    tokenizer = Tokenizer(models.BPE(known, [], **model))
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def tried(tokenizer: Tokenizer, text: str, tmp_path: Path) -> list[str]:
    """What is told when `text` is made into tokens by it."""
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    told: list[str] = []
    settings = Settings(str(tmp_path / "a.txt"), str(tmp_path / "tokenizer.json"))
    prepare(settings, tmp_path / "cache", told.append)
    return told


def test_a_tokenizer_without_its_unknown_token(tmp_path: Path) -> None:
    assert not [line for line in tried(by_words(TEXT), TEXT, tmp_path) if "warning" in line]
    with pytest.raises(UserError) as caught:
        tried(by_words(TEXT), TEXT + " foreign", tmp_path)
    message = str(caught.value)
    assert str(tmp_path / "tokenizer.json") in message and "unk" in message.lower()
    assert message.endswith("; give it a token for what it does not know, or use another")


def test_an_unknown_token_is_missing_where_the_sample_did_not_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("peers.data.given_tokenizer.sample", lambda documents: ["the strip"])
    with pytest.raises(UserError, match=r"can encode the run's text, but it fails .*; give it a token for"):
        tried(by_words(TEXT), TEXT + " foreign", tmp_path)


def test_one_that_drops_what_it_does_not_know_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"knows the run's text, but 56 % of the text's characters have no token in .*'a c"
    ):
        tried(by_characters("the "), TEXT, tmp_path)


def test_one_that_takes_most_for_its_unknown_token_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"\d\d % of the text's characters have no token"):
        tried(by_characters("the ", unk_token="[UNK]"), TEXT, tmp_path)
    with pytest.raises(UserError, match=r"\d\d % of the text's characters have no token"):
        tried(by_words("the strip", "[UNK]"), TEXT, tmp_path)


@pytest.mark.parametrize(
    ("share", "outcome"),
    [(LEAST_LOST / 2, "nothing"), (2 * LEAST_LOST, "warned"), (0.9 * MOST_LOST, "warned"), (0.06, "refused")],
)
@pytest.mark.parametrize("unknown", [None, "[UNK]"])
def test_the_two_lines(tmp_path: Path, share: float, outcome: str, unknown: str | None) -> None:
    lost = round(20_000 * share)
    text = "a" * (20_000 - lost) + "é" * lost
    tokenizer = by_characters("a\n", **({"unk_token": unknown} if unknown else {}))
    if outcome == "refused":
        with pytest.raises(UserError, match="6 % of the text's characters"):
            tried(tokenizer, text, tmp_path)
        return
    warnings = [line for line in tried(tokenizer, text, tmp_path) if line.startswith("warning: ")]
    assert len(warnings) == (outcome == "warned")
    assert all(f"{100 * share:.2g} % of the text's characters" in line and "'é'" in line for line in warnings)


def test_the_warning_is_repeated_when_the_tokens_are_in_the_cache(tmp_path: Path) -> None:
    text = "a" * 9_900 + "é" * 100
    first, second = (tried(by_characters("a"), text, tmp_path) for _ in range(2))
    assert any("tokens, " in line for line in first) and not any("tokens, " in line for line in second)
    assert [line for line in first if "warning" in line] == [line for line in second if "warning" in line] != []


def test_one_that_changes_the_text_but_knows_it_is_told_of(tmp_path: Path) -> None:
    tokenizer = by_words(TEXT)
    tokenizer.normalizer = normalizers.Lowercase()
    told = tried(tokenizer, TEXT.replace("the", "The"), tmp_path)
    assert any(
        "does not give the text back as it was: 'The strip is" in line and "'the strip is" in line for line in told
    )


def test_tokenizers_that_keep_all_are_not_spoken_of(tmp_path: Path) -> None:
    text = TEXT + "naïve 狭い帯 😀 \x7f\n"
    told = tried(bpe.train([TEXT], 300), text, tmp_path)
    assert not [line for line in told if "warning" in line or "give the text back" in line]


def test_byte_fallback_keeps_what_has_no_letter(tmp_path: Path) -> None:
    text = "a" * 900 + "狭" * 100
    known = {bpe.END: 0, "a": 1} | {f"<0x{byte:02X}>": 2 + byte for byte in range(256)}
    whole = Tokenizer(models.BPE(known, [], byte_fallback=True))
    whole.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    assert not [line for line in tried(whole, text, tmp_path) if "warning" in line]
    # Fallback that has no bytes to fall back to loses what it does not know.
    with pytest.raises(UserError, match=r"10 % of the text's characters have no token"):
        tried(by_characters("a", byte_fallback=True), text, tmp_path)


def test_a_unigram_models_unknown_token_is_found() -> None:
    assert unknown_id(Tokenizer(models.Unigram([("a", -1.0), ("<unk>", -2.0)], 1, False))) == 1
    assert unknown_id(by_characters("ab", unk_token="[UNK]")) == 3
    assert unknown_id(by_characters("ab")) is None


def broken(content: str | bytes) -> bytes:
    return content.encode() if isinstance(content, str) else content


GOOD = json.loads(bpe.train([TEXT], 300).to_str())
BROKEN: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "does not load"),
    "not JSON": (b"{", "does not load"),
    "a list": (b"[]", "does not load"),
    "another JSON file": (b'{"vocab_size": 300}', "does not load"),
    "the vocabulary alone": (json.dumps({"a": 0}).encode(), "does not load"),
    "compressed": (gzip.compress(json.dumps(GOOD).encode()), "does not load"),
    "of a kind that does not exist": (json.dumps(GOOD | {"model": {"type": "Magic"}}).encode(), "does not load"),
    "a wrong type": (json.dumps(GOOD | {"added_tokens": 3}).encode(), "does not load"),
    "a negative id": (json.dumps({**GOOD, "model": {**GOOD["model"], "vocab": {"a": -1}}}).encode(), "does not load"),
    "no tokens": (
        json.dumps({**GOOD, "added_tokens": [], "model": {**GOOD["model"], "vocab": {}, "merges": []}}).encode(),
        "it has no tokens",
    ),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_file_is_one_clear_error(tmp_path: Path, kind: str) -> None:
    content, message = BROKEN[kind]
    (tmp_path / "tokenizer.json").write_bytes(content)
    (tmp_path / "a.txt").write_text(TEXT)
    with pytest.raises(UserError, match=message) as caught:
        prepare(Settings(str(tmp_path / "a.txt"), str(tmp_path / "tokenizer.json")), tmp_path / "cache")
    assert str(tmp_path / "tokenizer.json") in str(caught.value)


def test_a_folder_is_no_tokenizer_but_may_hold_one(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no file is there; correct"):
        bpe.load(tmp_path)
    bpe.save(bpe.train([TEXT], 300), tmp_path / "tokenizer.json")
    with pytest.raises(UserError, match=rf"no file is there; name {tmp_path}/tokenizer.json"):
        bpe.load(tmp_path)


def test_a_panic_in_the_library_is_an_error_and_an_interrupt_stays_one() -> None:
    panic = type("PanicException", (BaseException,), {})
    with (
        pytest.raises(UserError, match=r"it fails \(index out of bounds\); use another"),
        bpe.library_errors("it fails", "use another"),
    ):
        raise panic("index out of bounds")
    with pytest.raises(KeyboardInterrupt), bpe.library_errors("it fails", "use another"):
        raise KeyboardInterrupt


@pytest.mark.parametrize("beyond", [False, True])
def test_more_ids_than_the_model_has_are_refused_before_any_work(tmp_path: Path, beyond: bool) -> None:
    made = by_characters("a") if beyond else bpe.train([TEXT], 300)
    if not beyond:
        made.add_tokens([f"<extra {i}>" for i in range(200)])
    spec = json.loads(made.to_str())
    if beyond:  # the count is small, but one id is high
        spec["model"]["vocab"]["b"] = 4_000_000_000
    (tmp_path / "t.json").write_text(json.dumps(spec))
    (tmp_path / "a.txt").write_text(TEXT)
    size = 4_000_000_001 if beyond else bpe.vocabulary_size(made)
    assert size > 400
    with pytest.raises(
        UserError, match=rf"at most data.vocab_size = 400 ids, .*t.json has {size}; set data.vocab_size"
    ):
        prepare(Settings(str(tmp_path / "a.txt"), str(tmp_path / "t.json")), tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("tokens/*"))


def test_the_sample_is_spread_over_all_documents() -> None:
    short = ["a", "b", "c"]
    assert sample(short) == short
    documents = [chr(0x4E00 + i) * 1_000 for i in range(1_000)]
    taken = sample(documents)
    assert sum(map(len, taken)) == SLICES * SLICE
    assert taken[0][0] == documents[0][0] and taken[-1][-1] == documents[-1][0]
    places = [ord(text[0]) - 0x4E00 for text in taken]
    assert places == sorted(places) and max(b - a for a, b in pairwise(places)) < 20


def test_nothing_but_white_space_is_no_loss(tmp_path: Path) -> None:
    check_on_text(by_characters("a"), tmp_path, [" \n" * 50], lambda _: None)


def test_a_home_folder_that_does_not_exist(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    for settings in (Settings("~no-such-user/a.txt", None), Settings(str(tmp_path / "a.txt"), "~no-such-user/t.json")):
        with pytest.raises(
            UserError, match=r"got '~no-such-user/.*', and there is no such home folder; write the path out"
        ):
            prepare(settings, tmp_path / "cache")
