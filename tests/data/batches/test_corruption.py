from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.batches.corruption import (
    corrupted_lengths,
    noise_mask,
    prefix_lm,
    span_corruption,
    span_corruption_lengths,
    ul2,
)
from data.batches.rows import Lengths, RowSettings, SpecialIds, lengths_of
from settings.declared import DataConfig
from settings.fields import AUTO
from settings.tasks import task_named

EOS, FIRST_SENTINEL = 1, 10_000
SPECIAL = SpecialIds(eos=EOS, pad=0, sentinels=tuple(range(FIRST_SENTINEL, FIRST_SENTINEL - 100, -1)))
KEYS = st.integers(0, 2**64 - 1)
DENSITIES, MEAN_SPANS = st.floats(0.01, 0.9), st.floats(1.0, 64.0)


def generator(key: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=key))


def lengths_for(objective: str, max_seq_len: int, max_target_len: int | None = None) -> Lengths:
    return lengths_of(DataConfig(max_seq_len=max_seq_len, max_target_len=max_target_len or AUTO), objective)


def corrupted(objective: str, tokens: np.ndarray, key: int, lengths: Lengths) -> tuple[np.ndarray, np.ndarray]:
    settings = RowSettings(lengths, SPECIAL, noise_density=0.15, mean_noise_span=3.0, decodes=True)
    row = task_named(objective).row({"tokens": tokens}, key, settings)
    return row.input_ids, row.labels


def is_sentinel(token: int) -> bool:
    return FIRST_SENTINEL - 100 < token <= FIRST_SENTINEL


def fill(inputs: list[int], labels: list[int]) -> list[int]:
    """Put the spans of the labels back where the input has their sentinels."""
    spans: dict[int, list[int]] = {}
    for token in labels[:-1]:
        if is_sentinel(token):
            assert token not in spans, "a sentinel was used twice"
            spans[token] = []
            last = token
        else:
            spans[last].append(token)
    assert all(spans.values()), "a masked span is empty"
    assert list(spans) == list(SPECIAL.sentinels[: len(spans)]), "they come in order, none is left out"
    assert [token for token in inputs if is_sentinel(token)] == list(spans), "input and labels have other sentinels"
    return [part for token in inputs[:-1] for part in spans.get(token, [token])]


@given(st.integers(2, 1500), DENSITIES, MEAN_SPANS, st.integers(1, 100), KEYS)
def test_every_token_is_kept_or_masked_exactly_once(
    length: int, density: float, mean_span: float, num_sentinels: int, key: int
) -> None:
    """Also where there are more spans than sentinels."""
    tokens = np.arange(2, length + 2)
    special = SpecialIds(EOS, 0, SPECIAL.sentinels[:num_sentinels])
    inputs, labels = span_corruption(tokens, generator(key), special, density, mean_span)
    assert fill(inputs.tolist(), labels.tolist()) == tokens.tolist()
    assert inputs[-1] == EOS and labels[-1] == EOS
    assert (len(inputs), len(labels)) == corrupted_lengths(length, density, mean_span, num_sentinels)
    mask = noise_mask(generator(key), length, density, mean_span, num_sentinels)
    assert len(mask) == length and not mask[0] and mask[-1]
    assert mask.sum() == min(max(round(length * density), 1), length - 1), "as many as T5 masks"


def t5_lengths(inputs_length: int, noise_density: float, mean_noise_span_length: float) -> tuple[int, int]:
    """`random_spans_helper` of T5, as it is written there (Apache-2.0)."""

    def lengths(tokens_length: int) -> tuple[int, int]:
        num_noise_tokens = round(tokens_length * noise_density)
        num_nonnoise_tokens = tokens_length - num_noise_tokens
        num_noise_spans = round(num_noise_tokens / mean_noise_span_length)
        return num_nonnoise_tokens + num_noise_spans + 1, num_noise_tokens + num_noise_spans + 1

    tokens_length = inputs_length - 1
    while lengths(tokens_length + 1)[0] <= inputs_length:
        tokens_length += 1
    return tokens_length, lengths(tokens_length)[1]


@pytest.mark.parametrize(("inputs_length", "density", "mean_span"), [(512, 0.15, 3.0), (333, 0.3, 8.0)])
def test_lengths_are_those_of_t5(inputs_length: int, density: float, mean_span: float) -> None:
    raw, _, target = span_corruption_lengths(inputs_length, density, mean_span, num_sentinels=1000)
    assert (raw, target) == t5_lengths(inputs_length, density, mean_span)


@pytest.mark.parametrize("objective", ["span", "ul2", "prefix", "denoise"])
@given(max_seq_len=st.integers(8, 300), target=st.one_of(st.none(), st.integers(4, 300)), key=KEYS)
def test_lengths_hold_for_every_objective(objective: str, max_seq_len: int, target: int | None, key: int) -> None:
    lengths = lengths_for(objective, max_seq_len, target)
    tokens = np.arange(2, lengths.raw_tokens + 2)
    inputs, labels = corrupted(objective, tokens, key, lengths)
    assert len(inputs) <= lengths.input_tokens <= max_seq_len
    assert len(labels) <= lengths.target_tokens <= (target or 10**9)
    assert inputs[-1] == EOS and labels[-1] == EOS
    assert corrupted(objective, tokens, key, lengths)[0].tolist() == inputs.tolist(), "the key alone decides"


def test_denoising_masks_single_tokens_and_asks_for_all() -> None:
    lengths = lengths_for("denoise", 5000)
    tokens = np.arange(2, lengths.raw_tokens + 2)
    inputs, labels = corrupted("denoise", tokens, 7, lengths)
    masked = inputs == FIRST_SENTINEL
    assert labels.tolist() == [*tokens.tolist(), EOS] and len(inputs) == 5000
    assert inputs[~masked].tolist() == labels[~masked].tolist() and 0.13 < masked.mean() < 0.17
    assert corrupted("denoise", tokens, 8, lengths)[0].tolist() != inputs.tolist()


@given(st.integers(2, 300), st.floats(0.05, 0.5), KEYS)
def test_a_prefix_and_its_continuation_are_the_window(length: int, share: float, key: int) -> None:
    tokens = np.arange(2, length + 2)
    inputs, labels = prefix_lm(tokens, generator(key), SPECIAL, Lengths(length, length, length), share)
    assert inputs[-1] == EOS and labels[-1] == EOS and len(inputs) >= 2 and len(labels) >= 2
    assert np.concatenate((inputs[:-1], labels[:-1])).tolist() == tokens.tolist()
    assert len(labels) - 1 <= max(1, round(2 * share * length))


def test_ul2_draws_each_denoiser_as_often() -> None:
    lengths = lengths_for("ul2", 512)
    tokens = np.arange(2, lengths.raw_tokens + 2)
    counts = Counter[tuple[int, int]]()
    for key in range(1400):
        inputs, labels = ul2(tokens, generator(key), SPECIAL, lengths)
        assert len(labels) <= lengths.target_tokens
        spans = sum(is_sentinel(token) for token in inputs.tolist())
        counts[(len(inputs) - spans, spans) if spans else (0, 0)] += 1
    assert len(counts) == 7 and min(counts.values()) > 140
