"""Inputs and targets made from a window of tokens.

- Span corruption (Raffel et al. 2020, section 3.1.4): masked spans become sentinels, the target spells them out. The
  mask follows `random_spans_noise_mask` of github.com/google-research/text-to-text-transfer-transformer.
- Prefix language modelling (Raffel et al. 2020, section 3.2.1): the encoder sees a beginning, the decoder goes on.
- UL2: a mixture of seven denoisers (Tay et al. 2022, section 3.1.2), drawn evenly for each row: R (span 3 and 8,
  density 0.15), S (prefix, a quarter is the target on average), X (span 3, 8 and 64 at density 0.5, and span 64 at
  0.15). The paper's mode tokens are left out; it calls them optional.
- Denoising: single tokens become a mask, the target is the whole window (as for ProtT5, Elnaggar et al. 2021; the mask
  is the first sentinel everywhere, as `noise_token_to_sentinel` of T5 has it).

Everything is a pure function of the tokens and a random generator, which has one key per row, so a mask depends neither
on the number of processes nor on the micro-batch.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from data.batches.rows import Ids, Lengths, SpecialIds

R_DENOISERS = ((0.15, 3.0), (0.15, 8.0))
X_DENOISERS = ((0.5, 3.0), (0.5, 8.0), (0.15, 64.0), (0.5, 64.0))
S_TARGET_SHARE = 0.25


def _noise_counts(length: int, density: float, mean_span: float, num_sentinels: int) -> tuple[int, int]:
    """Masked tokens and masked spans of a window; there are never more spans than sentinels."""
    length = max(length, 2)
    noise_tokens = min(max(round(length * density), 1), length - 1)
    spans = min(max(round(noise_tokens / mean_span), 1), noise_tokens, length - noise_tokens, num_sentinels)
    return noise_tokens, spans


def corrupted_lengths(raw_tokens: int, density: float, mean_span: float, num_sentinels: int = 100) -> tuple[int, int]:
    """Input and target length, with end of text, that span corruption makes of a window of `raw_tokens`."""
    noise_tokens, spans = _noise_counts(raw_tokens, density, mean_span, num_sentinels)
    return raw_tokens - noise_tokens + spans + 1, noise_tokens + spans + 1


@lru_cache(maxsize=256)
def span_corruption_lengths(
    max_seq_len: int, density: float, mean_span: float, num_sentinels: int = 100, max_target_len: int | None = None
) -> tuple[int, int, int]:
    """Find the longest window whose corrupted form still fits.

    Args:
        max_seq_len: longest encoder input with end of text, 4 or more.
        density: share of tokens masked; mean_span: mean length of a masked span.
        num_sentinels: most spans of one row.
        max_target_len: longest decoder target with end of text; None: whatever is needed.
    Returns:
        (raw_tokens, input_len, target_len); 512, 0.15, 3.0 -> (568, 512, 114).
    Source:
        `random_spans_helper` of T5. Both lengths grow by 0 or 1 with each token, so bisection finds the same as its
        loop.
    """

    def corrupted(raw: int) -> tuple[int, int]:
        return corrupted_lengths(raw, density, mean_span, num_sentinels)

    most = int(max_seq_len / (1 - density)) + 8
    raw = 1 + bisect_right(range(2, most), max_seq_len, key=lambda raw: corrupted(raw)[0])
    if max_target_len is not None:
        raw = 1 + bisect_right(range(2, raw + 1), max_target_len, key=lambda raw: corrupted(raw)[1])
    return raw, *corrupted(raw)


def ul2_target_tokens(raw_tokens: int, num_sentinels: int) -> int:
    """Longest target, with end of text, that a denoiser of UL2 makes of a window."""
    denoisers = (*R_DENOISERS, *X_DENOISERS)
    return max(corrupted_lengths(raw_tokens, *denoiser, num_sentinels)[1] for denoiser in denoisers)


def _segment(rng: np.random.Generator, num_items: int, num_segments: int) -> Ids:
    """Cut `num_items` into `num_segments` non-empty parts, all ways equally likely; their lengths."""
    cuts = np.sort(rng.choice(num_items - 1, num_segments - 1, replace=False)) + 1
    return np.diff(np.concatenate(([0], cuts, [num_items])))


def noise_mask(
    rng: np.random.Generator, length: int, density: float, mean_span: float, num_sentinels: int = 100
) -> NDArray[np.bool_]:
    """Draw which tokens of a window are masked; spans of kept and masked tokens alternate, beginning with kept.

    Returns:
        (length,) bool.
    """
    noise_tokens, spans = _noise_counts(length, density, mean_span, num_sentinels)
    masked = _segment(rng, noise_tokens, spans)
    unmasked = _segment(rng, max(length, 2) - noise_tokens, spans)
    return np.repeat(np.tile([False, True], spans), np.stack([unmasked, masked], axis=1).reshape(-1))[:length]


def span_corruption(
    tokens: Ids, rng: np.random.Generator, special: SpecialIds, density: float, mean_span: float
) -> tuple[Ids, Ids]:
    """Mask spans of a window.

    Args:
        tokens: (N,) ids, 2 or more.
    Returns:
        input ids: kept tokens with one sentinel per masked span, then eos; labels: each sentinel, then its tokens,
        then eos.
    """
    mask = noise_mask(rng, len(tokens), density, mean_span, len(special.sentinels))
    eos = np.array([special.eos])
    return (
        np.concatenate((_with_sentinels(tokens, mask, special.sentinels), eos)),
        np.concatenate((_with_sentinels(tokens, ~mask, special.sentinels), eos)),
    )


def _with_sentinels(tokens: Ids, hidden: NDArray[np.bool_], sentinels: Sequence[int]) -> Ids:
    """Put the n-th sentinel in the place of the n-th hidden span."""
    starts = hidden & ~np.concatenate(([False], hidden[:-1]))
    marked = tokens.copy()
    marked[starts] = np.asarray(sentinels)[: int(starts.sum())]
    return marked[starts | ~hidden]


def prefix_lm(
    tokens: Ids, rng: np.random.Generator, special: SpecialIds, lengths: Lengths, mean_target: float = 0.5
) -> tuple[Ids, Ids]:
    """Cut a window at an even random place into what the encoder sees and what the decoder continues with.

    Args:
        tokens: (N,) ids, 2 or more.
        mean_target: mean share of the target, up to 0.5 (even over 0 .. twice this share).
    Returns:
        input ids and labels, each with eos; together they hold the whole window.
    """
    longest_target = min(round(2 * mean_target * len(tokens)), lengths.target_tokens - 1)
    latest = min(len(tokens), lengths.input_tokens) - 1
    earliest = min(max(len(tokens) - longest_target, 1), latest)
    end = int(rng.integers(earliest, latest + 1))
    eos = np.array([special.eos])
    return np.concatenate((tokens[:end], eos)), np.concatenate((tokens[end:], eos))


def denoising(tokens: Ids, rng: np.random.Generator, special: SpecialIds, density: float) -> tuple[Ids, Ids]:
    """Mask single tokens of a window, each with the same probability.

    Returns:
        input ids: the window with the first sentinel for each masked token, then eos; labels: the window, then eos.
    """
    eos = np.array([special.eos])
    masked = np.where(rng.random(len(tokens)) < density, special.sentinels[0], tokens)
    return np.concatenate((masked, eos)), np.concatenate((tokens, eos))


def ul2(tokens: Ids, rng: np.random.Generator, special: SpecialIds, lengths: Lengths) -> tuple[Ids, Ids]:
    """Draw one of the seven denoisers of UL2 and apply it to as much of the window as fits the lengths."""
    choice = int(rng.integers(len(R_DENOISERS) + len(X_DENOISERS) + 1))
    if choice == 0:
        return prefix_lm(tokens, rng, special, lengths, S_TARGET_SHARE)
    density, mean_span = (*R_DENOISERS, *X_DENOISERS)[choice - 1]
    fits = span_corruption_lengths(
        lengths.input_tokens, density, mean_span, len(special.sentinels), lengths.target_tokens
    )[0]
    return span_corruption(tokens[:fits], rng, special, density, mean_span)
