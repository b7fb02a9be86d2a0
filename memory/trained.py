"""How many weights learn? All of them, those that are not frozen, or the adapters beside a frozen model.

Counted from the settings alone, without a model: gradients and the optimizer's state exist for weights that learn only.
A name of `freeze` that is Hugging Face's and not ours is counted as if it learnt, so that the plan is never too small.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase

from config import Config, T5ModelConfig
from settings import AUTO

SCATTERED = {"norms": "*norm.weight", "position_bias": "*bias.table"}  # as model.freezing has them
ADAPTED = {"q", "k", "v", "o", "wi", "wi_0", "wi_1", "wo"}
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Trained:
    """Weights that learn.

    Args:
        embedding, head: of these parts. encoder, decoder: of the widest block of each stack, adapters included.
        total: of the model, adapters included. factors: rows and columns of their matrices, and the vectors; shared_factors:
        those of embedding, head and vectors alone.
        adapters: weights beside the model's own, in fp32.
    """

    embedding: int
    head: int
    encoder: int
    decoder: int
    total: int
    factors: int
    shared_factors: int
    adapters: int = 0


def trained_counts(config: Config) -> Trained:
    """Count what learns under `freeze` and `lora_rank`."""
    model, rank = config.model, config.lora.lora_rank
    frozen = [word.strip() for word in (config.train.freeze or "").split(",") if word.strip()]
    own = [] if rank else [(name, shape) for name, shape in weight_shapes(model) if not _is_frozen(name, frozen)]
    beside = [
        (name, shape)
        for name, shape in adapter_shapes(model, rank, config.lora.lora_targets, config.lora.use_dora)
        if not _is_frozen(name.partition(".adapter.")[0] + ".weight", frozen)
    ]
    return _summed([*own, *beside], sum(math.prod(shape) for _, shape in beside))


def weight_shapes(c: T5ModelConfig) -> Iterator[tuple[str, Shape]]:
    """Name and shape of every weight of a model, as `model.t5` names them."""
    yield "embedding", (c.vocab_size, c.d_model)
    for stack, count in (("encoder", c.num_layers), ("decoder", c.num_decoder_layers)):
        table = (c.relative_attention_num_buckets, c.num_heads)
        if not c.bias_in_every_layer:
            yield f"{stack}.bias.table", table
        for index in range(count):
            block = f"{stack}.blocks.{index}"
            if c.bias_in_every_layer:
                yield f"{block}.bias.table", table
            for name in ("attention_norm", "feed_forward_norm", *(("cross_norm",) if stack == "decoder" else ())):
                yield f"{block}.{name}.weight", (c.d_model,)
            for path, shape in _matrices(c, stack == "decoder"):
                yield f"{block}.{path}.weight", shape
        yield f"{stack}.final_norm.weight", (c.d_model,)
    if not c.tie_word_embeddings:
        yield "head", (c.vocab_size, c.d_model)


def _matrices(c: T5ModelConfig, is_decoder: bool) -> Iterator[tuple[str, Shape]]:
    """Path inside a block and shape of every matrix."""
    inner = c.num_heads * c.d_kv
    for part in ("attention", *(("cross_attention",) if is_decoder else ())):
        for name in "qkv":
            yield f"{part}.{name}", (inner, c.d_model)
        yield f"{part}.o", (c.d_model, inner)
    gated = c.feed_forward_proj.startswith("gated-")
    for name in ("gate", "wi") if gated else ("wi",):
        yield f"feed_forward.{name}", (c.d_ff, c.d_model)
    yield "feed_forward.wo", (c.d_model, c.d_ff)


def adapter_shapes(c: T5ModelConfig, rank: int, targets: str, use_dora: bool) -> Iterator[tuple[str, Shape]]:
    """Name and shape of every weight of the adapters; none with rank 0."""
    if not rank:
        return
    gated = c.feed_forward_proj.startswith("gated-")
    wanted = {AUTO: {"q", "v"}, "all": ADAPTED}.get(targets, {word.strip() for word in targets.split(",")})
    for stack, count in (("encoder", c.num_layers), ("decoder", c.num_decoder_layers)):
        for path, (rows, columns) in _matrices(c, stack == "decoder"):
            kind = path.rpartition(".")[2]
            kind = {"gate": "wi_0", "wi": "wi_1" if gated else "wi"}.get(kind, kind)
            for index in range(count) if kind in wanted else ():
                name = f"{stack}.blocks.{index}.{path}.adapter"
                yield f"{name}.a", (rank, columns)
                yield f"{name}.b", (rows, rank)
                if use_dora:
                    yield f"{name}.magnitude", (rows,)


def _is_frozen(name: str, patterns: list[str]) -> bool:
    words = [SCATTERED.get(pattern, pattern) for pattern in patterns]
    return any(fnmatchcase(name, word) or fnmatchcase(name, f"{word}.*") for word in words)


def _summed(weights: list[tuple[str, Shape]], adapters: int) -> Trained:
    blocks: dict[tuple[str, str], int] = {}
    single = {"embedding": 0, "head": 0}
    total = factors = shared = 0
    for name, shape in weights:
        count, parts = math.prod(shape), name.split(".")
        total += count
        factors += sum(shape)
        if len(shape) == 1 or "blocks" not in parts:
            shared += sum(shape)
        if name in single:
            single[name] = count
        elif parts[1] == "blocks":
            blocks[parts[0], parts[2]] = blocks.get((parts[0], parts[2]), 0) + count
    widest = {
        stack: max((count for (its, _), count in blocks.items() if its == stack), default=0)
        for stack in ("encoder", "decoder")
    }
    return Trained(
        single["embedding"], single["head"], widest["encoder"], widest["decoder"], total, factors, shared, adapters
    )
