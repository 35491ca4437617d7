"""Opening a run: everything that is checked and made before the coordinator listens."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path

from peers.data.token_store import TokenStore, cache_folder, prepare
from protocol.config import DataConfig, RunConfig
from protocol.errors import UserError
from protocol.manifest import Manifest, describe_difference
from protocol.signing import SigningKey

Say = Callable[[str], None]


def load_tokens(
    config: RunConfig, data: Path | None = None, tokenizer: Path | None = None, say: Say | None = None
) -> TokenStore:
    """The run's tokens on this machine. `data` and `tokenizer` replace the configured paths.

    Raises:
        UserError: the data is missing, empty, too small, or has a larger vocabulary than the model.
    """
    elsewhere = {"path": data, "tokenizer": tokenizer}
    settings: DataConfig = config.data.model_copy(update={k: str(v) for k, v in elsewhere.items() if v is not None})
    tokens = prepare(settings, cache_folder(), say)
    if tokens.vocab_size > config.data.vocab_size:
        raise UserError(
            f"expected a tokenizer of at most data.vocab_size = {config.data.vocab_size} ids, "
            f"{config.data.tokenizer} has {tokens.vocab_size}: set data.vocab_size to that"
        )
    needed = config.train.sequence_length + 1
    if len(tokens.train) < needed:
        raise UserError(
            f"expected at least {needed} tokens of text (train.sequence_length + 1), got {len(tokens.train)}: "
            "add text, or lower train.sequence_length"
        )
    return tokens


def new_run(config: RunConfig, tokens: TokenStore) -> tuple[Manifest, SigningKey]:
    """A new run's manifest, and the new key that signs it."""
    key = SigningKey.generate()
    return Manifest(config, tokens.fingerprint, tokens.unigram_loss, key.public, secrets.token_hex(8)), key


def check_resumed(manifest: Manifest, config: RunConfig | None, tokens: TokenStore) -> None:
    """Check that a run to be resumed is still the same.

    Raises:
        UserError: another configuration was given, or the data has changed.
    """
    if config is not None and config.hash() != manifest.config.hash():
        raise UserError(
            "the configuration differs from the one the run was begun with: leave the file out to resume, "
            "or start a new run in another folder"
        )
    difference = describe_difference(manifest, tokens.fingerprint)
    if difference:
        raise UserError(difference)
