"""Opening a run: everything that is checked and made before the coordinator listens."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path

import torch

from compression.basis import basis_fingerprint
from peers.data.images import load_images
from peers.data.run_data import RunData
from peers.data.token_store import TokenStore, cache_folder, prepare
from protocol.config import RunConfig
from protocol.data_config import DataConfig
from protocol.errors import InputError
from protocol.manifest import Manifest, check_data, check_given_basis
from protocol.run_changes import changes, check_changes
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
    _refuse_unneeded(data, tokenizer, f"images are {config.data.source}")
    return load_images(config.data.source)


def load_tokens(
    config: RunConfig, data: Path | None = None, tokenizer: Path | None = None, say: Say | None = None
) -> TokenStore:
    """The run's tokens on this machine. `data` and `tokenizer` replace the configured paths.

    Raises:
        UserError: the data is missing, empty, too small, or has a larger vocabulary than the model.
    """
    if config.data.path is None:
        _refuse_unneeded(data, None, f"text is {config.data.source}")
    if config.data.tokenizer is None:
        _refuse_unneeded(None, tokenizer, "tokenizer is trained on its text")
    elsewhere = {"path": data, "tokenizer": tokenizer}
    settings: DataConfig = config.data.model_copy(update={k: str(v) for k, v in elsewhere.items() if v is not None})
    tokens = prepare(settings, cache_folder(), say)
    needed = config.train.sequence_length + 1
    if len(tokens.train) < needed:
        fact = f"expected at least {needed} tokens of text (train.sequence_length + 1), got {len(tokens.train)}"
        raise InputError("data", "unfit", fact, "add text, or lower train.sequence_length")
    return tokens


def _refuse_unneeded(data: Path | None, tokenizer: Path | None, why: str) -> None:
    """Refuse what this machine brings although the run has no use for it: its user believes that it counts."""
    if data is not None:
        raise InputError("data", "unneeded", f"expected no data of this machine's: the run's {why}", "leave it out")
    if tokenizer is not None:
        fact = f"expected no tokenizer of this machine's: the run's {why}"
        raise InputError("tokenizer", "unneeded", fact, "leave it out")


def new_run(config: RunConfig, data: RunData, basis_DK: torch.Tensor | None = None) -> tuple[Manifest, SigningKey]:
    """A new run's manifest, and the new key that signs it. `basis_DK`: of a run that is given one."""
    key, nonce, basis = SigningKey.generate(), secrets.token_hex(8), _fingerprint(basis_DK)
    return Manifest(config, data.fingerprint, data.unigram_loss, key.public, nonce, basis), key


def check_resumed(
    manifest: Manifest, config: RunConfig, where: Path, data: RunData, basis_DK: torch.Tensor | None = None
) -> Manifest:
    """The manifest of the run in `where`, which is resumed with `config`: as it was, or the next of its chain.

    Raises:
        UserError: a field differs that cannot change, or the data or the given basis do.
    """
    found = changes(manifest.config, config)
    check_changes(found, str(where))
    check_agreement(manifest, data, basis_DK)
    # From which step it holds follows from the checkpoints that the peers bring.
    return manifest.followed_by(0, config) if found else manifest


def check_agreement(manifest: Manifest, data: RunData, basis_DK: torch.Tensor | None) -> None:
    """Check that what this machine has is what the run was begun with.

    Raises:
        UserError: the data or the given basis differ.
    """
    check_data(manifest, data.fingerprint)
    check_given_basis(manifest, _fingerprint(basis_DK))


def _fingerprint(basis_DK: torch.Tensor | None) -> str | None:
    return None if basis_DK is None else basis_fingerprint(basis_DK)
