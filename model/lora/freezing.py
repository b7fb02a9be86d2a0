"""Weights frozen by name or pattern, in our names or Hugging Face's.

A word names everything below it: `encoder`, `decoder.blocks.0`, `encoder.block.0.layer.1`. Wildcards are those of file
names: `*.q.weight`. Two words name what lies scattered: `norms` and `position_bias`. A tied head is the embedding.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from language import join, say
from model.shapes import SCATTERED, TOKEN_ROWS, hf_names, is_meant
from settings.declared import T5ModelConfig
from settings.errors import UserError

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
    weights = dict(model.named_parameters())
    trained = left_to_train(model.config, {name: weight.requires_grad for name, weight in weights.items()}, patterns)
    for name in weights.keys() - set(trained):
        weights[name].requires_grad_(False)
    return trained


def left_to_train(shape: T5ModelConfig, learns: Mapping[str, bool], patterns: str) -> list[str]:
    """Names of the weights that stay trained, before there is a model.

    Args:
        shape: of the model. learns: name of each weight, adapters' among them -> whether it learns where nothing is frozen.
        patterns: as of `freeze`.
    Raises:
        UserError: as `freeze`.
    """
    theirs, unknown, frozen = hf_names(shape), [], set[str]()
    # an adapter's weights are meant by the name of the matrix that they stand beside
    beside = {name: f"{name.partition('.adapter.')[0]}.weight" if ".adapter." in name else name for name in learns}
    beside |= {name: name.partition(".")[2] for name in learns if name.startswith(f"{TOKEN_ROWS}.")}
    for pattern in (word.strip() for word in patterns.split(",") if word.strip()):
        found = [name for name in learns if is_meant(pattern, name, theirs[beside[name]])]
        if not found:
            unknown.append(
                say(
                    "--freeze = {pattern}, names no weight of this model; there are: {parts}",
                    pattern=pattern,
                    parts=_parts(learns),
                )
            )
        frozen.update(found)
    if unknown:
        raise UserError(*unknown)
    trained = [name for name, learning in learns.items() if learning and name not in frozen]
    if not trained:
        raise UserError("--freeze = {patterns}, leaves nothing to train; freeze less", patterns=patterns)
    return trained


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
