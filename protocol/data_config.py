"""The section of a run's configuration on its data."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from protocol.section import Section
from protocol.task import IMAGE_SOURCES


class DataConfig(Section):
    """The text, or the images. Their fingerprint is part of the manifest."""

    source: Literal["stdlib", "text", "jsonl", "digits"] = Field(
        "stdlib",
        description="stdlib: the Python standard library's source; text or jsonl: a file or folder; "
        "digits: scikit-learn's 1,797 images of 8 x 8, for the vit",
    )
    path: str | None = Field(None, description="file or folder for text and jsonl; relative to the working folder")
    field: str = Field("text", description="the key that holds the text in each jsonl line")
    vocab_size: int = Field(4096, ge=257, le=1 << 32, description="V: size of the BPE vocabulary, trained once")
    tokenizer: str | None = Field(None, description="a tokenizer.json to use instead of training one")

    @model_validator(mode="after")
    def _path_given(self) -> DataConfig:
        if self.source in ("text", "jsonl") and self.path is None:
            raise ValueError(f'expected a path for source = {self.source!r}, got none: add path = "FILE OR FOLDER"')
        if self.source not in ("text", "jsonl") and self.path is not None:
            raise ValueError(
                f"expected no path for source = {self.source!r}, got {self.path!r}: leave it out, or set source to "
                '"text" or "jsonl"'
            )
        if self.source in IMAGE_SOURCES and self.tokenizer is not None:
            raise ValueError(
                f"expected no tokenizer for source = {self.source!r}, which has no text, got {self.tokenizer!r}: "
                "leave it out"
            )
        return self
