"""Opening a run: everything that is checked and made before the coordinator listens."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path

from peers.data.images import load_images
from peers.data.run_data import RunData
from peers.data.token_store import TokenStore, cache_folder, prepare
from protocol.config import DataConfig, RunConfig
from protocol.errors import UserError
from protocol.manifest import Manifest, describe_difference
from protocol.signing import SigningKey
from protocol.task import IMAGE_SOURCES

Say = Callable[[str], None]


def load_data(
    config: RunConfig, data: Path | None = None, tokenizer: Path | None = None, say: Say | None = None
) -> RunData:
    """The run's data on this machine. `data` and `tokenizer` replace the configured paths of text.

    Raises:
        UserError: the data is missing, empty, too small, or has a larger vocabulary than the model.
    """
    if config.data.source not in IMAGE_SOURCES:
        return load_tokens(config, data, tokenizer, say)
    if data is not None or tokenizer is not None:
        raise UserError(f"expected no --data and no --tokenizer: the run's images are {config.data.source}")
    return load_images(config.data.source)


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


def new_run(config: RunConfig, data: RunData) -> tuple[Manifest, SigningKey]:
    """A new run's manifest, and the new key that signs it."""
    key = SigningKey.generate()
    return Manifest(config, data.fingerprint, data.unigram_loss, key.public, secrets.token_hex(8)), key


def check_resumed(manifest: Manifest, config: RunConfig | None, data: RunData) -> None:
    """Check that a run to be resumed is still the same.

    Raises:
        UserError: another configuration was given, or the data has changed.
    """
    if config is not None and config.hash() != manifest.config.hash():
        raise UserError(
            "the configuration differs from the one the run was begun with: leave the file out to resume, "
            "or start a new run in another folder"
        )
    difference = describe_difference(manifest, data.fingerprint)
    if difference:
        raise UserError(difference)
