from __future__ import annotations

import pytest

from settings.declared import T5ModelConfig


@pytest.fixture(autouse=True)
def small_products(one_thread: None) -> None:
    """All products in the tests of this wing are small."""


@pytest.fixture
def config() -> T5ModelConfig:
    """A T5 1.0 that is small, and whose sizes all differ."""
    return T5ModelConfig(
        vocab_size=37,
        d_model=12,
        d_kv=5,
        d_ff=20,
        num_layers=2,
        num_decoder_layers=3,
        num_heads=3,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=20,
    )
