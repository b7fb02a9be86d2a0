"""Settings that have no effect, since another one that they need is not as it has to be."""

from __future__ import annotations

from collections.abc import Collection

from language import Message, join, say
from settings.declared import Config, Noting, flags_of, settings_by_name
from settings.fields import AUTO, Need, show
from settings.precedence import ORIGINS
from settings.tasks import MODEL_HEADS, default_objective

STRENGTH = (None, *ORIGINS)


def without_effect(config: Config, decided: Collection[str], objective: str = "") -> list[Message]:
    """The settings that the user has named in vain, each in a sentence.

    A default is never one of them, and neither is a value whose need was changed by something stronger, as the flag
    `--lora_rank=0` over a file that has `lora_alpha`. Nor are the values that a run has saved, which are all there are.

    Args:
        decided: the settings whose values nothing will change any more; what needs others is not looked at.
        objective: that the data have decided; empty: as the settings say.
    """
    settings, values, origins = settings_by_name(), config.as_dict(), dict(config.origins)
    values["objective"] = objective or _objective_of(config)
    if objective:  # An edited line is a default for all data: rows of another kind stand over it, as a file does.
        origins["objective"] = "file"
    problems = list[Message]()
    for name, (_, member) in settings.items():
        if not _is_chosen(config, name, values[name], member.default):
            continue
        for need in member.metadata["needs"]:
            is_weaker = STRENGTH.index(origins[name]) < STRENGTH.index(origins.get(need.name))
            default = settings[need.name][1].default
            if need.name in decided and not is_weaker and not need.allows(values[need.name], default):
                problems.append(_sentence(name, show(member, values[name]), need, values[need.name]))
    return problems


def unread(config: Config, command: str) -> list[Message]:
    """What the user has named and nobody has read until now, each in a sentence."""
    values = config.as_dict()
    return [
        say("--{name} = {value}, has no effect on this run", name=name, value=show(member, values[name]))
        for name, (group, member) in flags_of(command).items()
        if isinstance(getattr(config, group), Noting)
        and name not in config.reads
        and _is_chosen(config, name, values[name], member.default)
    ]


def _is_chosen(config: Config, name: str, value: object, default: object) -> bool:
    is_saved = config.is_record and config.origin(name) == "file"
    return config.given(name) and value != default and not is_saved


def _objective_of(config: Config) -> str:
    """The objective as far as settings say it; auto: the data do."""
    if config.data.objective == AUTO and config.train.is_finetune and not MODEL_HEADS[config.model.head].has_labels:
        return default_objective(is_finetune=True)
    return config.data.objective


def _sentence(name: str, value: str, need: Need, actual: object) -> Message:
    if not need.words:
        return say(
            "--{name} = {value}, has no effect without --{needed}; omit it", name=name, value=value, needed=need.name
        )
    return say(
        "--{name} = {value}, has no effect with {needed} {actual}, only with {words}; omit it",
        name=name,
        value=value,
        needed=need.name,
        actual=actual,
        words=join(say(" or "), need.words),
    )
