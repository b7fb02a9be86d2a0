"""Makes the golden files: small random models of each family, run by transformers (5.23).

    python tests/golden/make_golden.py [FAMILY ...]

Each folder holds a checkpoint as transformers writes it, and `expected.safetensors`: inputs, logits, loss, the gradient
of every weight, and greedy answers. `tests/model/test_golden.py` compares ours with them, so that the tests
need no transformers.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

HERE = Path(__file__).resolve().parent
SHAPE = {"d_model": 24, "d_kv": 5, "d_ff": 40, "num_heads": 3, "num_layers": 2, "vocab_size": 50}
SMALL_BUCKETS = {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 20}
# family -> (class prefix in transformers, settings beside SHAPE, whether the head is a matrix of its own)
FAMILIES: dict[str, tuple[str, dict[str, Any], bool]] = {
    "t5": ("T5", {"feed_forward_proj": "relu"}, False),
    "t5_v1_1": ("T5", {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, **SMALL_BUCKETS}, True),
    "mt5": ("MT5", {"feed_forward_proj": "gated-gelu"}, True),
    "umt5": ("UMT5", {"feed_forward_proj": "gated-gelu"}, False),
    "byt5": (
        "T5",
        {
            "feed_forward_proj": "gated-gelu",
            "tie_word_embeddings": False,
            "vocab_size": 384,
            "num_layers": 3,
            "num_decoder_layers": 1,
        },
        True,
    ),
}
SOURCE_LENGTHS, TARGET_LENGTH, GREEDY_TOKENS = (140, 9, 33), 12, 20


def build(family: str, seed: int) -> nn.Module:
    """A random model of transformers in which every weight matters: norms off 1, strong attention and position bias."""
    import transformers

    prefix, settings, own_head = FAMILIES[family]
    torch.manual_seed(seed)
    config = getattr(transformers, f"{prefix}Config")(**{**SHAPE, **settings}, decoder_start_token_id=0)
    model = getattr(transformers, f"{prefix}ForConditionalGeneration")(config).eval()
    if own_head:
        model.lm_head.weight = nn.Parameter(torch.randn(config.vocab_size, config.d_model) * 0.5)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "layer_norm" in name:
                weight.add_(torch.randn_like(weight) * 0.2)
            elif "relative_attention_bias" in name:
                weight.copy_(torch.randn_like(weight))
            elif name.endswith((".o.weight", ".wo.weight", ".q.weight")):
                weight.mul_(3.0)
    return model


def inputs(vocab_size: int, seed: int) -> dict[str, Tensor]:
    """Padded rows of unequal length, and labels with some that carry no loss."""
    generator = torch.Generator().manual_seed(seed)
    rows, longest = len(SOURCE_LENGTHS), max(SOURCE_LENGTHS)
    ids = torch.randint(2, vocab_size, (rows, longest), generator=generator)
    mask = (torch.arange(longest) < torch.tensor(SOURCE_LENGTHS)[:, None]).long()
    labels = torch.randint(2, vocab_size, (rows, TARGET_LENGTH), generator=generator)
    labels[1, 7:], labels[2, 3] = -100, -100
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": labels}


def reference(model: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """What transformers says: logits, loss, gradients by stored name, greedy answers filled up with padding."""
    model.zero_grad()
    result = model(**batch)
    result.loss.backward()
    gradients = {f"grad.{name}": weight.grad.clone() for name, weight in model.named_parameters()}
    source = {name: batch[name] for name in ("input_ids", "attention_mask")}
    greedy = model.generate(**source, max_new_tokens=GREEDY_TOKENS, do_sample=False, num_beams=1)
    return {**batch, "logits": result.logits.detach(), "loss": result.loss.detach(), "greedy": greedy, **gradients}


def _lively_seed(family: str) -> int:
    """A seed with answers worth comparing: several tokens, and one that ends before the others."""
    for seed in range(1000):
        model = build(family, seed)
        batch = inputs(model.config.vocab_size, seed)
        answers = reference(model, batch)["greedy"][:, 1:]
        ended = (answers == 1).any(1)
        if ended.any() and not ended.all() and min(len(set(row)) for row in answers.tolist()) >= 4:
            return seed
    raise RuntimeError(f"{family}: no seed gives lively answers")


def _write_family(family: str) -> None:
    seed = _lively_seed(family)
    model, folder = build(family, seed), HERE / family
    batch = inputs(model.config.vocab_size, seed)
    model.save_pretrained(folder)
    save_file({k: v.contiguous() for k, v in reference(model, batch).items()}, folder / "expected.safetensors")
    if family == "t5_v1_1":  # as transformers 4 wrote it: the flag alone tells that the head stands alone, unscaled
        config = json.loads((folder / "config.json").read_text())
        del config["scale_decoder_outputs"]
        config["tie_word_embeddings"] = False
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _write_buckets() -> None:
    from transformers.models.t5.modeling_t5 import T5Attention

    distances = torch.arange(-300, 301)
    tables = {
        f"{count}.{far}.{both}": T5Attention._relative_position_bucket(distances, bool(both), count, far)
        for count, far in ((32, 128), (8, 20), (64, 1000))
        for both in (0, 1)
    }
    save_file(tables, HERE / "buckets.safetensors")


if __name__ == "__main__":
    for family in sys.argv[1:] or FAMILIES:
        _write_family(family)
    _write_buckets()
