"""Which samples microbatch (t, m) holds: a function of (seed, step, microbatch) and of nothing else.

The stage that embeds the inputs and the stage that scores the targets sit on different machines, and either may be
replaced in the middle of a step. Neither sends the other any text: each works out the same windows for itself.

    seed --------> key of Philox -----+
                                      +--> raw 64-bit words --> offsets --> windows of length + 1 tokens
    step, m -----> high counter words +

Philox is counter-based: the words of (step, m) come from a place of their own in the counter's range, so no microbatch
has to be drawn to reach another, and no two share a word. We take the raw words and reduce them ourselves, because
numpy promises stable streams for its bit generators and not for `Generator.integers`.

Windows of text are drawn with replacement. A set of images is small and each is used many times, so images are drawn
without: an epoch is a permutation of all of them, and the microbatches take theirs from the epochs in turn.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from protocol.errors import UserError

Ints = npt.NDArray[np.int64]

# The second key word keeps these draws apart from each other and from any other use of the run's seed.
_DOMAIN = 0x69737468_6D757301
_EPOCH_DOMAIN = 0x69737468_6D757302


def _places(n_tokens: int, length: int) -> int:
    """How many places a window of `length + 1` tokens can begin at; raises UserError when there is none."""
    if n_tokens < length + 1:
        raise UserError(
            f"expected at least {length + 1} tokens for a window of length {length}, but the text has {n_tokens}; "
            "use more text or a shorter length"
        )
    return n_tokens - length


def sample_offsets(seed: int, step: int, microbatch: int, count: int, n_tokens: int, length: int) -> Ints:
    """The `count` places, each in [0, n_tokens - length), where the windows of one microbatch begin.

    Drawn with replacement. `seed`, `step` and `microbatch` lie in [0, 2**64), else OverflowError. Raises UserError
    when the text is shorter than one window.
    """
    places = _places(n_tokens, length)
    key = np.array([seed, _DOMAIN], dtype=np.uint64)
    # The low two words count the draws; the high two name the microbatch.
    counter = np.array([0, 0, microbatch, step], dtype=np.uint64)
    words = np.random.Philox(key=key, counter=counter).random_raw(count)
    # The bias of a plain remainder is places / 2**64: under one in ten million for a trillion tokens.
    return (words % np.uint64(places)).astype(np.int64)


def spaced_offsets(index: int, count: int, n_tokens: int, length: int) -> Ints:
    """The `count` places, each in [0, n_tokens - length), of fixed microbatch `index` of a held-out text.

    Each microbatch is spread evenly over the whole text. The indices fill each other's gaps by halves (0, 1/2, 1/4,
    3/4, ...), so the first 1, 2, 4, ... microbatches together are evenly spread too. Raises UserError when the text is
    shorter than one window.
    """
    places = _places(n_tokens, length)
    bits = index.bit_length()
    shift = int(f"{index:0{bits}b}"[::-1], 2) if bits else 0
    return np.array([((j << bits) + shift) * places // (count << bits) for j in range(count)], dtype=np.int64)


def epoch_places(seed: int, step: int, microbatch: int, count: int, microbatches: int, n_samples: int) -> Ints:
    """The `count` places, each in [0, n_samples), of a microbatch of `step` (from 1 on), of `microbatches` in each.

    Every sample is drawn equally often to within one. A microbatch may end one epoch and begin the next. `seed` lies in
    [0, 2**64), else OverflowError. Raises UserError when there is no sample.
    """
    if n_samples < 1:
        raise UserError("expected at least one sample to train on, but the data has none; use other data")
    first = ((step - 1) * microbatches + microbatch) * count
    drawn = [_epoch(seed, i // n_samples, n_samples)[i % n_samples] for i in range(first, first + count)]
    return np.array(drawn, dtype=np.int64)


@lru_cache(maxsize=4)
def _epoch(seed: int, epoch: int, n_samples: int) -> Ints:
    """A permutation of the samples: the order that sorts as many random words."""
    key = np.array([seed, _EPOCH_DOMAIN], dtype=np.uint64)
    counter = np.array([0, 0, epoch, 0], dtype=np.uint64)
    words = np.random.Philox(key=key, counter=counter).random_raw(n_samples)
    return np.argsort(words, kind="stable").astype(np.int64)


def windows(tokens: npt.NDArray[np.generic], offsets: Ints, length: int) -> Ints:
    """`[count, length + 1]`: the tokens from each offset on. Inputs are `[:, :-1]`, next-token targets `[:, 1:]`.

    `tokens` is flat, of any integer type, and may be memory-mapped. Raises IndexError for an offset past the end.
    """
    return np.asarray(tokens[offsets[:, None] + np.arange(length + 1)], dtype=np.int64)


def unigram_loss(counts: npt.ArrayLike) -> float:
    """Entropy in nats of the distribution that `counts` (one number per token id) describes.

    It is the loss of a model that knows how often each token occurs and nothing else: a model above it has learned no
    order yet. Raises UserError when nothing was counted.
    """
    seen = np.asarray(counts, dtype=np.float64)
    seen = seen[seen > 0]
    if seen.size == 0:
        raise UserError("expected a text with at least one token, but it has none; use more text")
    share = seen / seen.sum()
    return max(0.0, float(-(share * np.log(share)).sum()))
