"""Whether the adapters of a run fit its base. Shapes and names suffice: nothing is loaded, and torch is not imported."""

from __future__ import annotations

from pathlib import Path

from language import say
from model.formats.adapter_folder import is_adapter, read_info
from model.lora.form import LoraSettings, adapted_paths, resolve_targets
from model.lora.freezing import left_to_train
from model.shapes import adapter_weights, label_head_weights, token_range, token_row_weights, weights
from settings.declared import Config, T5ModelConfig
from settings.errors import UserError
from settings.fields import AUTO
from training.saved_model import form_settings


def lora_settings(config: Config, shape: T5ModelConfig) -> LoraSettings | None:
    """The adapters that the settings ask for; None: none.

    Raises:
        UserError: targets that this model does not have.
    """
    lora = config.lora
    if not lora.lora_rank:
        return None
    alpha = 2.0 * lora.lora_rank if lora.lora_alpha == AUTO else float(lora.lora_alpha)
    targets = resolve_targets(shape, lora.lora_targets)
    return LoraSettings(lora.lora_rank, alpha, targets, lora.lora_dropout, _tokens(shape, lora.lora_tokens))


def _tokens(shape: T5ModelConfig, asked: str | None) -> tuple[int, int] | None:
    try:
        found = token_range(asked)
    except ValueError:
        found = shape.vocab_size, shape.vocab_size
    if found is not None and found[1] >= shape.vocab_size:
        raise UserError(
            "--lora_tokens = {asked}, names no tokens of this model; allowed: ids as FIRST-LAST, 0 to {vocab_size}",
            asked=asked,
            vocab_size=shape.vocab_size - 1,
        )
    return found


def form_problems(settings: LoraSettings, base: Path) -> list[str]:
    """What a run asks for that the adapter which it goes on from is not."""
    info = read_info(base)
    asked, found = form_settings(settings), form_settings(info.settings)
    if set(settings.targets) == set(info.settings.targets):  # in whatever order
        del found["lora_targets"]
    return [
        say(
            "--{name} = {asked}, the adapter {base} has {value}; omit it or name the same, or start from its "
            "base {info_base}",
            name=name,
            asked=asked[name],
            base=base,
            value=value,
            info_base=info.base,
        )
        for name, value in found.items()
        if asked[name] != value
    ]


def check_trained(config: Config, base: Path | None) -> list[str]:
    """Find what is wrong with the adapters and frozen parts of a run, before anything is loaded. Memory: none."""
    if config.lora.lora_rank and base is None:
        return [
            say(
                "--lora_rank = {lora_rank}, a base to adapt is needed; set --finetune_from=FOLDER, or train without "
                "adapters",
                lora_rank=config.lora.lora_rank,
            )
        ]
    if base is not None and is_adapter(base) and not config.lora.lora_rank:
        return [
            say(
                "--finetune_from = {base}, is an adapter; continue with it by --lora_rank={rank}, or merge it first",
                base=base,
                rank=read_info(base).settings.rank,
            )
        ]
    shape, problems = config.model, []
    learns = {weight.name: True for weight in weights(shape)}
    try:
        settings = lora_settings(config, shape)
        if settings is not None:
            adapted_paths(shape, settings)
            if base is not None and is_adapter(base):
                problems += form_problems(settings, base)
            adapters = adapter_weights(shape, settings.rank, settings.targets)
            trained = (*adapters, *token_row_weights(shape, settings.tokens), *label_head_weights(shape))
            learns = {**dict.fromkeys(learns, False), **{weight.name: True for weight in trained}}
    except UserError as error:
        problems += error.problems
    try:
        left_to_train(shape, learns, config.train.freeze or "")
    except UserError as error:
        problems += error.problems
    return problems
