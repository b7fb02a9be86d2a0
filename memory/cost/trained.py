"""How many weights learn? All of them, those that are not frozen, or the adapters beside a frozen model.

Counted from the settings alone, without a model: gradients and the optimizer's state exist for weights that learn only.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from config import Config
from memory.cost.blocks import NO_ADAPTERS, Adapted
from model import shapes
from model.shapes import DECODER, ENCODER, Stack, Weight


@dataclass(frozen=True)
class Trained:
    """Weights that learn.

    Args:
        embedding, head: of these parts. encoder, decoder: of the widest block of each stack, adapters included.
        total: of the model, adapters included. matrices: of the matrices of blocks. factors: rows and columns of all matrices,
            and the vectors; shared_factors: those of embedding, head, bias tables and vectors alone.
        turn_flops: of one turn of Muon over the matrices of blocks.
        adapters: weights beside the model's own, in fp32.
    """

    embedding: int
    head: int
    encoder: int
    decoder: int
    total: int
    matrices: int
    factors: int
    shared_factors: int
    turn_flops: int
    adapters: int = 0

    @classmethod
    def of(cls, weights: Iterable[Weight]) -> Trained:
        """Count these weights."""
        found = list(weights)
        matrices = [weight for weight in found if shapes.is_block_matrix(weight.name, weight.shape)]
        return cls(
            sum(weight.size for weight in found if weight.role == "embedding"),
            sum(weight.size for weight in found if weight.role == "head"),
            _widest_block(found, ENCODER),
            _widest_block(found, DECODER),
            sum(weight.size for weight in found),
            sum(weight.size for weight in matrices),
            sum(sum(weight.shape) for weight in found),
            sum(sum(weight.shape) for weight in found) - sum(sum(weight.shape) for weight in matrices),
            # the shorter side's square, its own product, and the product of the matrix with it
            sum(4 * weight.size * min(weight.shape) + 2 * min(weight.shape) ** 3 for weight in matrices),
            sum(weight.size for weight in found if weight.role == "adapter"),
        )


def trained_counts(config: Config) -> Trained:
    """Count what learns under `freeze` and `lora_rank`."""
    model, lora = config.model, config.lora
    words = [word.strip() for word in (config.train.freeze or "").split(",") if word.strip()]
    targets = shapes.asked_targets(model, lora.lora_targets)
    beside = shapes.adapter_weights(model, lora.lora_rank, targets, lora.use_dora)
    learning = beside if lora.lora_rank else shapes.weights(model)
    return Trained.of(w for w in learning if not any(shapes.is_meant(word, w.name, w.hf_name) for word in words))


def adapted_by(config: Config) -> Adapted:
    """What the adapters that are asked for make a graph hold."""
    model, lora = config.model, config.lora
    if not lora.lora_rank:
        return NO_ADAPTERS
    return Adapted(tuple(shapes.asked_targets(model, lora.lora_targets)), lora.use_dora, lora.lora_dropout > 0)


def _widest_block(weights: Iterable[Weight], stack: Stack) -> int:
    blocks: dict[int, int] = {}
    for weight in weights:
        if weight.stack == stack and weight.block is not None:
            blocks[weight.block] = blocks.get(weight.block, 0) + weight.size
    return max(blocks.values(), default=0)
