"""Makes `published_4.json`: published configurations, random weights, and the logits of transformers 4.57.1.

    python tests/golden/make_published.py        (where transformers is 4.57.1, the last of version 4)

Version 5 reads some of these files otherwise (a UMT5 without tied heads, an mT5 with them). The weights follow from
their names, so that logits alone are kept; `tests/model/formats/test_families.py` compares ours with them.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

KEPT = Path(__file__).resolve().parent / "published_4.json"
SIZES = {"d_ff": 40, "d_kv": 5, "d_model": 24, "num_heads": 3, "num_layers": 2, "vocab_size": 50}
_GATED = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "num_decoder_layers": 3}
_HALVES = {"dense_act_fn": "gelu_new", "is_gated_act": True}
_TASK = {"early_stopping": True, "max_length": 300, "num_beams": 4, "prefix": "translate English to German: "}
_COMMON: dict[str, Any] = {
    "decoder_start_token_id": 0,
    "dropout_rate": 0.1,
    "eos_token_id": 1,
    "initializer_factor": 1.0,
    "is_encoder_decoder": True,
    "layer_norm_epsilon": 1e-06,
    "model_type": "t5",
    "pad_token_id": 0,
    "relative_attention_num_buckets": 32,
    "architectures": ["T5ForConditionalGeneration"],
}
# the keys of the published files; sizes are those above
PUBLISHED: dict[str, dict[str, Any]] = {
    "t5-small": {
        **_COMMON,
        "n_positions": 512,
        "output_past": True,
        "task_specific_params": {"translation_en_to_de": _TASK},
    },
    "t5-v1_1-base": {**_COMMON, **_GATED, "output_past": True, "use_cache": True},
    "flan-t5-base": {
        **_COMMON,
        **_GATED,
        **_HALVES,
        "n_positions": 512,
        "output_past": True,
        "relative_attention_max_distance": 128,
        "torch_dtype": "float32",
        "transformers_version": "4.23.1",
        "classifier_dropout": 0.0,
    },
    "mt5-small": {
        **_COMMON,
        **_GATED,
        "model_type": "mt5",
        "architectures": ["MT5ForConditionalGeneration"],
        "tokenizer_class": "T5Tokenizer",
        "use_cache": True,
        "transformers_version": "4.10.0.dev0",
    },
    "mt5, tied by version 4": {
        **_COMMON,
        **_HALVES,
        "model_type": "mt5",
        "architectures": ["MT5ForConditionalGeneration"],
        "feed_forward_proj": "gated-gelu",
        "tie_word_embeddings": True,
        "num_decoder_layers": 2,
        "transformers_version": "4.46.3",
    },
    "umt5-small": {
        **_COMMON,
        **_GATED,
        **_HALVES,
        "model_type": "umt5",
        "architectures": ["UMT5ForConditionalGeneration"],
        "scalable_attention": True,
        "tokenizer_class": "T5Tokenizer",
        "transformers_version": "4.31.0.dev0",
        "use_cache": True,
    },
    "umt5, tied by version 4": {
        **_COMMON,
        **_HALVES,
        "model_type": "umt5",
        "architectures": ["UMT5ForConditionalGeneration"],
        "dtype": "float32",
        "feed_forward_proj": "gated-gelu",
        "transformers_version": "4.57.1",
    },
    "byt5-small": {
        **_COMMON,
        **_GATED,
        "gradient_checkpointing": False,
        "tokenizer_class": "ByT5Tokenizer",
        "transformers_version": "4.7.0.dev0",
        "num_layers": 4,
        "num_decoder_layers": 1,
    },
    "codet5-base": {
        **_COMMON,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "feed_forward_proj": "relu",
        "gradient_checkpointing": False,
        "id2label": {"0": "LABEL_0"},
        "label2id": {"LABEL_0": 0},
        "n_positions": 512,
        "num_decoder_layers": 2,
        "output_past": True,
        "torch_dtype": "float32",
        "transformers_version": "4.10.2",
        "use_cache": True,
        "task_specific_params": {"translation_en_to_de": _TASK},
    },
    "madlad400-3b-mt": {
        **_COMMON,
        **_GATED,
        "decoder_start_token_id": 0,
        "pad_token_id": 1,
        "eos_token_id": 2,
        "dropout_rate": 0.1,
        "relative_attention_max_distance": 128,
        "torch_dtype": "float32",
        "transformers_version": "4.35.0",
        "use_cache": True,
    },
    "prot_t5_xl": {**_COMMON, "n_positions": 512, "output_past": True, "feed_forward_proj": "relu", "use_cache": True},
    "ankh-base": {
        **_COMMON,
        **_GATED,
        **_HALVES,
        "relative_attention_num_buckets": 64,
        "relative_attention_max_distance": 128,
        "output_past": True,
        "torch_dtype": "float32",
        "use_cache": True,
    },
    "flan-ul2": {**_COMMON, **_GATED, "feed_forward_proj": "gated-silu", "dense_act_fn": "silu", "is_gated_act": True},
}


def weight(name: str, shape: list[int]) -> Tensor:
    """The random weight of a name; large enough that attention and position bias matter."""
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
    return 1.0 + 0.2 * drawn if "layer_norm" in name else drawn * (1.0 if "bias" in name or "shared" in name else 0.3)


def inputs() -> tuple[Tensor, Tensor]:
    """Ids of two sources, and what the decoder should write; what it reads follows from the start token."""
    generator = torch.Generator().manual_seed(7)
    return tuple(torch.randint(3, 50, (2, length), generator=generator) for length in (150, 9))  # type: ignore[return-value]


def make() -> dict[str, Any]:
    """Of each configuration: the file, the tensors' shapes and the logits of some tokens; and all keys of version 4."""
    import transformers

    kept: dict[str, Any] = {}
    for name, published in PUBLISHED.items():
        family = published["model_type"].upper()
        shape = {**SIZES, **published}
        model = getattr(transformers, f"{family}ForConditionalGeneration")(
            getattr(transformers, f"{family}Config").from_dict(shape)
        ).eval()
        with torch.no_grad():
            for stored, parameter in model.named_parameters():
                parameter.copy_(weight(stored, list(parameter.shape)))
            ids, labels = inputs()
            logits = model(input_ids=ids, labels=labels).logits[:, :, :8]
        tensors = {stored: list(parameter.shape) for stored, parameter in model.named_parameters()}
        kept[name] = {"config": shape, "tensors": tensors, "logits": logits.tolist()}
    configs = (transformers.T5Config(), transformers.MT5Config(), transformers.UMT5Config())
    keys = {
        "config.json": sorted({key for config in configs for key in config.to_dict()}),
        "generation_config.json": sorted(transformers.GenerationConfig().to_dict()),
    }
    return {"version": transformers.__version__, "keys": keys, "families": kept}


if __name__ == "__main__":
    KEPT.write_text(json.dumps(make()) + "\n", encoding="utf8")
