"""Whether the adapters of a run fit its base. Shapes and names suffice: nothing is loaded, and torch is not
imported.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from model.formats.adapter_folder import is_adapter, read_info
from model.lora.form import LoraSettings, adapted_paths, resolve_targets
from model.lora.freezing import left_to_train
from model.shapes import adapter_weights, label_head_weights, token_range, token_row_weights, weights
from settings.declared import LoraConfig, T5ModelConfig
from settings.errors import UserError, collected
from settings.fields import AUTO
from support.language import say
from training.saved_model import form_settings


def lora_settings(lora: LoraConfig, model: T5ModelConfig) -> LoraSettings | None:
    """The adapters that the settings ask for; None: none.

    Raises:
        UserError: targets or tokens that this model does not have.
    """
    if not lora.lora_rank:
        return None
    alpha = 2.0 * lora.lora_rank if lora.lora_alpha == AUTO else float(lora.lora_alpha)
    targets = resolve_targets(model, lora.lora_targets)
    tokens = None
    last = model.vocab_size  # A word that is no range names no token of the model.
    with suppress(ValueError):
        tokens = token_range(lora.lora_tokens)
        last = -1 if tokens is None else tokens[1]
    if last >= model.vocab_size:
        raise UserError(
            "--lora_tokens = {asked}, names no tokens of this model; allowed: ids as FIRST-LAST, 0 to {vocab_size}",
            asked=lora.lora_tokens,
            vocab_size=model.vocab_size - 1,
        )
    return LoraSettings(lora.lora_rank, alpha, targets, lora.lora_dropout, tokens)


def form_problems(settings: LoraSettings, base: Path) -> list[str]:
    """What a run asks for that the adapter which it goes on from is not."""
    info = read_info(base)
    of_adapter = info.settings
    if set(settings.targets) == set(of_adapter.targets):
        of_adapter = replace(of_adapter, targets=settings.targets)  # Their order says nothing.
    requested = form_settings(settings)
    return [
        say(
            "--{name} = {asked}, the adapter {base} has {value}; omit it or name the same, or start from its "
            "base {info_base}",
            name=name,
            asked=requested[name],
            base=base,
            value=value,
            info_base=info.base,
        )
        for name, value in form_settings(of_adapter).items()
        if requested[name] != value
    ]


def check_trained(model: T5ModelConfig, lora: LoraConfig, freeze: str | None, base: Path | None) -> list[str]:
    """Find what is wrong with the adapters and frozen parts of a run, before anything is loaded. Memory: none."""
    adapter = base if base is not None and is_adapter(base) else None
    if lora.lora_rank and base is None:
        text = (
            "--lora_rank = {lora_rank}, a base to adapt is needed; set --finetune_from=FOLDER, or train without "
            "adapters"
        )
        return [say(text, lora_rank=lora.lora_rank)]
    if adapter is not None and not lora.lora_rank:
        text = "--finetune_from = {base}, is an adapter; continue with it by --lora_rank={rank}, or merge it first"
        return [say(text, base=base, rank=read_info(adapter).settings.rank)]
    problems: list[str] = []
    is_trained = {weight.name: True for weight in weights(model)}
    with collected(problems):
        settings = lora_settings(lora, model)
        if settings is not None:
            adapted_paths(model, settings)
            if adapter is not None:
                problems += form_problems(settings, adapter)
            adapters = adapter_weights(model, settings.rank, settings.targets)
            added = (*adapters, *token_row_weights(model, settings.tokens), *label_head_weights(model))
            is_trained = {**dict.fromkeys(is_trained, False), **{weight.name: True for weight in added}}
    with collected(problems):
        left_to_train(model, is_trained, freeze or "")
    return problems
