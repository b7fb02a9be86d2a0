"""Settings that have no effect, since another one that they need is not as it has to be."""

from __future__ import annotations

from collections.abc import Collection

from settings.declared import Config, Noting, flags_of, settings_by_name
from settings.fields import AUTO, Need, show
from settings.precedence import strength
from settings.tasks import default_objective
from support.language import Message, join, say


def without_effect(config: Config, decided: Collection[str], objective: str = "") -> list[Message]:
    """The settings that the user has named in vain, each in a sentence.

    A default is never one of them, and neither is a value whose need was changed by something stronger, as the flag
    `--lora_rank=0` over a file that has `lora_alpha`. Nor are the values that a run has saved, which are all there are.

    Args:
        decided: the settings whose values nothing will change any more; what needs others is not looked at.
        objective: that the data have decided; empty: as the settings say.
    """
    settings = settings_by_name()
    values = config.as_dict()
    origins = {name: config.origin(name) for name in settings}
    if objective:  # An edited line is a default for all data: rows of another kind stand over it, as a file does.
        values["objective"] = objective
        origins["objective"] = "file"
    elif values["objective"] == AUTO and config.train.is_finetune:
        values["objective"] = default_objective(is_finetune=True)
    problems = list[Message]()
    for name in filter(config.is_changed, settings):
        _, member = settings[name]
        for need in member.metadata["needs"]:
            is_weaker = strength(origins[name]) < strength(origins[need.name])
            default = settings[need.name][1].default
            if need.name in decided and not is_weaker and not need.allows(values[need.name], default):
                problems.append(_sentence(name, show(member, values[name]), need, values[need.name]))
    return problems


def unread(config: Config, command: str) -> list[Message]:
    """What the user has named and nobody has read until now, each in a sentence."""
    values = config.as_dict()
    problems = list[Message]()
    for name, (group, member) in flags_of(command).items():
        is_noted = isinstance(getattr(config, group), Noting)
        if is_noted and name not in config.reads and config.is_changed(name):
            value = show(member, values[name])
            problems.append(say("--{name} = {value}, has no effect on this run", name=name, value=value))
    return problems


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
