"""Name, shape, role and Hugging Face name of each weight of a T5, from its configuration alone.

This is the one description of the model beside its code (`model.t5`, in whose order the weights stand here). File
formats, adapters, freezing, the plan, quantization and the optimizers read it; a test compares it with the
model and with transformers. It imports no torch: a plan is made before any model.

Shapes: V vocabulary, D d_model, I = H K inner width of attention, F d_ff, r rank of an adapter.
Source: names of transformers' T5, mT5 and UMT5.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Literal, NamedTuple

from settings.declared import T5ModelConfig
from settings.fields import AUTO

Stack = Literal["encoder", "decoder"]
Role = Literal[
    "embedding",
    "head",
    "norm",
    "bias table",
    "q",
    "k",
    "v",
    "o",
    "gate",
    "wi",
    "wo",
    "adapter",
    "label head",
    "label bias",
]
ENCODER: Stack = "encoder"
DECODER: Stack = "decoder"
STACKS = (ENCODER, DECODER)
PRODUCTS = ("q", "k", "v", "o", "gate", "wi", "wo")  # The roles of the matrices of blocks.
ALL = "all"
# Words of the setting `freeze` for weights that are spread over all blocks -> the pattern that each word stands for.
FREEZE_SHORTHANDS = {"norms": "*norm.weight", "position_bias": "*bias.table"}
TOKEN_ROWS = "token_rows"
LABEL_HEAD = "label_head"  # Hugging Face calls it `classifier` or `classification_head`.
EMBEDDING_HEAD = "embedding_head"  # sentence-transformers keeps its matrix in the folder `2_Dense`.
# Role -> Hugging Face's name of the matrices that widen in feed-forward: without a gate, and with one.
_WIDENING: tuple[dict[Role, str], dict[Role, str]] = ({"wi": "wi"}, {"gate": "wi_0", "wi": "wi_1"})
_TABLE = "bias.table"
_HF_TABLE = "0.SelfAttention.relative_attention_bias.weight"


class Weight(NamedTuple):
    """One weight of a model, or of an adapter beside one of its matrices.

    Args:
        name: as `model.t5` has it. hf_name: in Hugging Face's folders; of an adapter that of its matrix.
        shape: a matrix or table has two sides, a norm or bias one.
        role: what it does. In feed-forward `gate` is what the activation is applied to where it is gated.
        stack: encoder or decoder; None: embedding and heads. block: its number; None: outside of blocks.
    """

    name: str
    hf_name: str
    shape: tuple[int, ...]
    role: Role
    stack: Stack | None = None
    block: int | None = None

    @property
    def size(self) -> int:
        """How many numbers it has."""
        return math.prod(self.shape)

    @property
    def is_product(self) -> bool:
        """Whether it is a matrix of a block, which adapters can stand beside."""
        return self.role in PRODUCTS

    @property
    def target(self) -> str:
        """What Hugging Face calls a matrix of a block: q, k, v, o, wi, wi_0, wi_1 or wo."""
        return self.hf_name.split(".")[-2]


def is_gated(c: T5ModelConfig) -> bool:
    """Whether feed-forward has a second matrix, `gate`, whose activation its inner values are multiplied by."""
    return c.feed_forward_proj.startswith("gated-")


def inner_width(c: T5ModelConfig) -> int:
    """Inner width of attention, I."""
    return c.num_heads * c.d_kv


def weights(c: T5ModelConfig) -> Iterator[Weight]:
    """Every weight of a model, in the order of `T5.named_parameters`."""
    yield Weight("embedding", "shared.weight", (c.vocab_size, c.d_model), "embedding")
    if c.has_own_table:
        yield Weight("head", "lm_head.weight", (c.vocab_size, c.d_model), "head")
    for stack, count in stacks_of(c).items():
        if not c.bias_in_every_layer:
            yield Weight(f"{stack}.{_TABLE}", f"{stack}.block.0.layer.{_HF_TABLE}", _table(c), "bias table", stack)
        for index in range(count):
            yield from block_weights(c, stack, index)
        yield Weight(f"{stack}.final_norm.weight", f"{stack}.final_layer_norm.weight", (c.d_model,), "norm", stack)
    yield from label_head_weights(c)


def stacks_of(c: T5ModelConfig) -> dict[Stack, int]:
    """The stacks of a model, and how many blocks each has: an encoder, and a decoder unless there is none."""
    return {ENCODER: c.num_layers, **({DECODER: c.num_decoder_layers} if c.num_decoder_layers else {})}


def label_head_weights(c: T5ModelConfig) -> Iterator[Weight]:
    """The weights of a head over labels or of one that gives vectors, in the order of the model; none without one."""
    if c.gives_vectors and c.embedding_size:
        name = f"{EMBEDDING_HEAD}.dense.weight"
        yield Weight(name, name, (c.embedding_size, c.d_model), "label head")
    if not c.num_labels:
        return
    hf_name = "classifier"
    if c.has_dense_head:
        yield from _label_layer("dense", "classification_head.dense", c.d_model, c.d_model)
        hf_name = "classification_head.out_proj"
    yield from _label_layer("out", hf_name, c.num_labels, c.d_model)


def _label_layer(name: str, hf_name: str, rows: int, columns: int) -> Iterator[Weight]:
    yield Weight(f"{LABEL_HEAD}.{name}.weight", f"{hf_name}.weight", (rows, columns), "label head")
    yield Weight(f"{LABEL_HEAD}.{name}.bias", f"{hf_name}.bias", (rows,), "label bias")


def block_weights(c: T5ModelConfig, stack: Stack, index: int = 0) -> Iterator[Weight]:
    """The weights of one block, in the order of the model."""
    for name, hf_name, shape, role in _in_block(c, is_decoder=stack == DECODER):
        yield Weight(
            f"{stack}.blocks.{index}.{name}", f"{stack}.block.{index}.layer.{hf_name}", shape, role, stack, index
        )


_Inside = tuple[str, str, tuple[int, ...], Role]  # name inside of a block, here and in Hugging Face's folders


def _in_block(c: T5ModelConfig, is_decoder: bool) -> Iterator[_Inside]:
    last = 1 + is_decoder
    norm = (c.d_model,)
    yield "attention_norm.weight", "0.layer_norm.weight", norm, "norm"
    yield from _attention(c, "attention", "0.SelfAttention")
    if c.bias_in_every_layer:
        yield _TABLE, _HF_TABLE, _table(c), "bias table"
    if is_decoder:
        yield "cross_norm.weight", "1.layer_norm.weight", norm, "norm"
        yield from _attention(c, "cross_attention", "1.EncDecAttention")
    yield "feed_forward_norm.weight", f"{last}.layer_norm.weight", norm, "norm"
    for role, hf_name in _WIDENING[is_gated(c)].items():
        yield f"feed_forward.{role}.weight", f"{last}.DenseReluDense.{hf_name}.weight", (c.d_ff, c.d_model), role
    yield "feed_forward.wo.weight", f"{last}.DenseReluDense.wo.weight", (c.d_model, c.d_ff), "wo"


def _attention(c: T5ModelConfig, name: str, hf_name: str) -> Iterator[_Inside]:
    inner = inner_width(c)
    roles: tuple[Role, ...] = ("q", "k", "v")
    for role in roles:
        yield f"{name}.{role}.weight", f"{hf_name}.{role}.weight", (inner, c.d_model), role
    yield f"{name}.o.weight", f"{hf_name}.o.weight", (c.d_model, inner), "o"


def _table(c: T5ModelConfig) -> tuple[int, int]:
    return c.relative_attention_num_buckets, c.num_heads


def hf_names(c: T5ModelConfig) -> dict[str, str]:
    """Our name -> name in Hugging Face's folders, of every weight."""
    return {weight.name: weight.hf_name for weight in weights(c)}


# --- what is counted


@lru_cache(maxsize=64)
def weight_counts(c: T5ModelConfig) -> dict[str, int]:
    """Weights of the parts of a model: embedding, head of either kind, one encoder and one decoder block, and all.

    Only one block of each stack is looked at, so that a configuration may speak of any number of them.
    """
    one_block = replace(c, num_layers=1, num_decoder_layers=min(1, c.num_decoder_layers))
    counts = dict.fromkeys(("embedding", "head", *STACKS, "outside"), 0)
    for weight in weights(one_block):
        counts[_part_of(weight)] += weight.size
    outside = counts["embedding"] + counts["head"] + counts.pop("outside")
    blocks = c.num_layers * counts[ENCODER] + c.num_decoder_layers * counts[DECODER]
    return {**counts, "total": outside + blocks}


def _part_of(weight: Weight) -> str:
    if weight.block is not None:
        return str(weight.stack)
    return {"embedding": "embedding", "head": "head", "label head": "head", "label bias": "head"}.get(
        weight.role, "outside"
    )


# --- what is adapted, frozen and decayed


def targets_of(c: T5ModelConfig) -> tuple[str, ...]:
    """The names of matrices that adapters can be asked for, in the order of their first use."""
    return tuple(dict.fromkeys(weight.target for weight in block_weights(c, ENCODER) if weight.is_product))


def requested_targets(c: T5ModelConfig, targets: str) -> tuple[str, ...]:
    """The matrices that the setting `lora_targets` names, which need not exist in this model."""
    return {AUTO: ("q", "v"), ALL: targets_of(c)}.get(targets, comma_separated(targets))


def comma_separated(text: str) -> tuple[str, ...]:
    """The non-empty parts of a text between its commas."""
    return tuple(filter(None, map(str.strip, text.split(","))))


def adapter_weights(c: T5ModelConfig, rank: int, targets: Collection[str]) -> Iterator[Weight]:
    """Every weight of the adapters (`model.lora.adapter`) beside the matrices that `targets` name."""
    for weight in weights(c):
        if weight.is_product and weight.target in targets:
            rows, columns = weight.shape
            path = weight.name.removesuffix(".weight")
            yield weight._replace(name=f"{path}.adapter.a", shape=(rank, columns), role="adapter")
            yield weight._replace(name=f"{path}.adapter.b", shape=(rows, rank), role="adapter")


def token_range(tokens: str | None) -> tuple[int, int] | None:
    """The ids of the first and the last token that `lora_tokens` names, such as 32100-32227; None: none.

    Raises:
        ValueError: it names no such range.
    """
    if tokens in (AUTO, None):
        return None
    first, _, last = str(tokens).partition("-")
    start = int(first)
    end = int(last or first)
    if start > end:
        raise ValueError
    return start, end


def token_row_weights(c: T5ModelConfig, tokens: tuple[int, int] | None) -> Iterator[Weight]:
    """The rows of embedding and head that learn beside adapters (`model.lora.token_rows`)."""
    if tokens is not None:
        for weight in weights(c):
            if weight.role in ("embedding", "head"):
                shape = tokens[1] - tokens[0] + 1, c.d_model
                yield weight._replace(name=f"{TOKEN_ROWS}.{weight.name}", shape=shape)


def matches_pattern(pattern: str, name: str, hf_name: str) -> bool:
    """Whether a pattern of the setting `freeze`, or one of `FREEZE_SHORTHANDS`, matches one of a weight's two names or
    the module that the weight is in.
    """
    pattern = FREEZE_SHORTHANDS.get(pattern, pattern)
    return any(fnmatchcase(each, pattern) or fnmatchcase(each, f"{pattern}.*") for each in (name, hf_name))


def is_matrix(name: str, shape: Sequence[int]) -> bool:
    """Whether products or lookups read a weight by rows: what is held in int8, and decayed.

    Neither norms, bias tables nor heads over labels and of vectors: they are small, and fp32 wherever they are.
    """
    return (
        len(shape) == 2 and not name.endswith(_TABLE) and not name.startswith((f"{LABEL_HEAD}.", f"{EMBEDDING_HEAD}."))
    )


def is_block_matrix(name: str, shape: Sequence[int]) -> bool:
    """Whether a weight is a matrix of a block or of an adapter in it, so that every row learns from every token."""
    return is_matrix(name, shape) and name.rpartition(".")[2] not in ("embedding", "head")
