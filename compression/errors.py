"""Errors of the codecs. The network side turns those caused by another peer's bytes into refusals."""


class CodecError(ValueError):
    """Bytes, a tensor or ids that a codec cannot take: what was expected and what came is in the message."""
