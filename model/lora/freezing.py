"""Weights frozen by name or pattern, in our names or Hugging Face's.

A name means all weights below it: `encoder`, `decoder.blocks.0`, `encoder.block.0.layer.1`. Wildcards are those of file
names: `*.q.weight`. `norms` and `position_bias` mean those weights in all blocks. A tied head is named `embedding`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from model.shapes import FREEZE_SHORTHANDS, TOKEN_ROWS, comma_separated, hf_names, matches_pattern
from settings.declared import T5ModelConfig
from settings.errors import UserError, refuse
from support.language import join, say

if TYPE_CHECKING:
    from model.t5 import T5


def freeze(model: T5, patterns: str) -> list[str]:
    """Freeze what the patterns name: no gradient, no optimizer state.

    Args:
        patterns: separated by commas, e.g. `encoder,embedding`; empty: nothing.
    Returns:
        names of the weights that stay trained.
    Raises:
        UserError: some patterns match no weight, or nothing is left to train.
    """
    is_trainable = {name: weight.requires_grad for name, weight in model.named_parameters()}
    trained = left_to_train(model.config, is_trainable, patterns)
    for name in is_trainable.keys() - set(trained):
        model.get_parameter(name).requires_grad_(False)
    return trained


def left_to_train(shape: T5ModelConfig, is_trainable: Mapping[str, bool], patterns: str) -> list[str]:
    """Names of the weights that stay trained; needs only the names, not a model.

    Args:
        shape: of the model.
        is_trainable: name of each weight, also of adapters -> whether it is trained unless `patterns` freeze it.
        patterns: as for `freeze`.
    Raises:
        UserError: as `freeze`.
    """
    all_hf_names = hf_names(shape)
    hf_name_of = {name: all_hf_names[_base_weight(name)] for name in is_trainable}
    matches = {
        pattern: {name for name, hf_name in hf_name_of.items() if matches_pattern(pattern, name, hf_name)}
        for pattern in comma_separated(patterns)
    }
    refuse(
        [
            say(
                "--freeze = {pattern}, names no weight of this model; there are: {parts}",
                pattern=pattern,
                parts=_parts(is_trainable),
            )
            for pattern, matching in matches.items()
            if not matching
        ]
    )
    frozen = set[str]().union(*matches.values())
    trained = [name for name in is_trainable if is_trainable[name] and name not in frozen]
    if not trained:
        raise UserError("--freeze = {patterns}, leaves nothing to train; freeze less", patterns=patterns)
    return trained


def _base_weight(name: str) -> str:
    """The weight of the base model that an adapter or the rows of added tokens belong to; of all other weights the name
    itself.
    """
    path, is_adapter, _ = name.partition(".adapter.")
    return f"{path}.weight" if is_adapter else path.removeprefix(f"{TOKEN_ROWS}.")


def _parts(names: Iterable[str]) -> str:
    """The patterns that a user may give for this model, shortest first, and one whole name as an example."""
    top_level = dict.fromkeys(name.split(".")[0] for name in names)
    stacks = [f"{stack}.blocks.0 ..." for stack in ("encoder", "decoder")]
    example = next(name for name in names if name.endswith("q.weight"))
    return join(
        ", ",
        [
            *top_level,
            *FREEZE_SHORTHANDS,
            *stacks,
            say("patterns such as *.q.weight, whole names such as {example}", example=example),
        ],
    )
