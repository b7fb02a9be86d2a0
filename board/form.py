"""The settings of `train`, as `settings/declared.py` declares them, as form fields for the page."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping
from functools import cache
from typing import Any

from board.planning import words_of
from settings.declared import Config, flags_of, places
from settings.fields import AUTO, allowed, read_settings_file, show
from settings.precedence import PRESETS_DIR, model_presets
from settings.program import FILE, IS_INSTALLED, PACKAGE
from support.language import translation

# Those that decide most, in the order in which one asks; the words for them stand in the page's texts.
FIRST = (
    "train_file",
    "is_finetune",
    "finetune_from",
    "model_preset",
    "lora_rank",
    "max_steps",
    "epochs",
    "effective_batch_size",
    "max_seq_len",
    "learning_rate",
    "memory_budget",
    "run_name",
)
# The page decides these, or does not offer them: above all where is read and written.
OWN = frozenset((*places(), "shards_dir", "config", "overwrite", "is_keep_training"))


@cache
def form(language: str) -> dict[str, Any]:
    """Fields by group, and the models there are.

    Args:
        language: in use, in which values are described.
    """
    groups: dict[str, list[dict[str, Any]]] = {}
    for name, (group, member) in flags_of("train").items():
        if name not in OWN:
            groups.setdefault(group, []).append(_field(name, member))
    return {
        "first": list(FIRST),
        "groups": [{"name": group, "fields": fields} for group, fields in groups.items()],
        "models": list(model_presets()),
        "default_model": Config().model_preset,
        "machines": list(read_settings_file(PRESETS_DIR / "machines.yaml")),
    }


def _field(name: str, member: dataclasses.Field[Any]) -> dict[str, Any]:
    facts = member.metadata
    return {
        "name": name,
        "help": facts["help"],
        "help_zh": translation(facts["help"], "zh"),
        "kind": getattr(facts["kind"], "__name__", facts["kind"]),
        "unit": facts["unit"],
        "default": None if member.default is None else show(member, member.default),
        "choices": [choice for choice in facts["choices"] if choice != AUTO],
        "allowed": allowed(facts),
    }


def command_line(command: str, flags: Mapping[str, str]) -> str:
    """The command as one would type it."""
    return shlex.join([*([PACKAGE] if IS_INSTALLED else ["python", FILE]), command, *words_of(flags)])
