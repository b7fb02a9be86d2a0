"""Weights frozen by name or pattern, in our names or Hugging Face's.

A word names everything below it: `encoder`, `decoder.blocks.0`, `encoder.block.0.layer.1`. Wildcards are those of file
names: `*.q.weight`. Two words name what lies scattered: `norms` and `position_bias`. A tied head is the embedding.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from common.language import join, say
from model.shapes import SCATTERED, TOKEN_ROWS, hf_names, is_meant, words_of
from settings.declared import T5ModelConfig
from settings.errors import UserError, refuse

if TYPE_CHECKING:
    from model.t5 import T5


def freeze(model: T5, patterns: str) -> list[str]:
    """Freeze what the patterns name: no gradient, no optimizer state.

    Args:
        patterns: separated by commas, e.g. `encoder,embedding`; empty: nothing.
    Returns:
        names of the weights that stay trained.
    Raises:
        UserError: a pattern names nothing (all such at once), or nothing is left to train.
    """
    learns = {name: weight.requires_grad for name, weight in model.named_parameters()}
    trained = left_to_train(model.config, learns, patterns)
    for name in learns.keys() - set(trained):
        model.get_parameter(name).requires_grad_(False)
    return trained


def left_to_train(shape: T5ModelConfig, learns: Mapping[str, bool], patterns: str) -> list[str]:
    """Names of the weights that stay trained, before there is a model.

    Args:
        shape: of the model. learns: name of each weight, adapters' among them -> whether it learns where nothing is
            frozen.
        patterns: as of `freeze`.
    Raises:
        UserError: as `freeze`.
    """
    published = hf_names(shape)
    names = {name: published[_weight_of(name)] for name in learns}
    matches = {
        word: {name for name, hf_name in names.items() if is_meant(word, name, hf_name)} for word in words_of(patterns)
    }
    refuse(
        [
            say(
                "--freeze = {pattern}, names no weight of this model; there are: {parts}",
                pattern=word,
                parts=_parts(learns),
            )
            for word, matching in matches.items()
            if not matching
        ]
    )
    frozen = set[str]().union(*matches.values())
    trained = [name for name in learns if learns[name] and name not in frozen]
    if not trained:
        raise UserError("--freeze = {patterns}, leaves nothing to train; freeze less", patterns=patterns)
    return trained


def _weight_of(name: str) -> str:
    """The name of the matrix or table that a weight of an adapter or a row of tokens stands beside; else the weight's
    own.
    """
    path, is_adapter, _ = name.partition(".adapter.")
    return f"{path}.weight" if is_adapter else path.removeprefix(f"{TOKEN_ROWS}.")


def _parts(names: Iterable[str]) -> str:
    """The words that name parts of this model, shortest first, and one whole name as an example."""
    heads = dict.fromkeys(name.split(".")[0] for name in names)
    stacks = [f"{stack}.blocks.0 ..." for stack in ("encoder", "decoder")]
    example = next(name for name in names if name.endswith("q.weight"))
    return join(
        ", ",
        [
            *heads,
            *SCATTERED,
            *stacks,
            say("patterns such as *.q.weight, whole names such as {example}", example=example),
        ],
    )
