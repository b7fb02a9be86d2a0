"""`load`: the checked settings of one command, from the defaults, `config.py`, presets, a file and flags."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from settings.consistency import HEADS, PREFERENCES, TEXT, check, objective_problems
from settings.declared import COMMANDS, HEAD_EVAL_ROWS, MOST_TOKENS, Config, flags_of, settings_by_name
from settings.edits import user_edits
from settings.errors import refuse
from settings.fields import AUTO
from settings.precedence import layered


def load(command: str, flags: Mapping[str, Any] | None = None) -> Config:
    """Build the checked configuration of one command from raw flags.

    Args:
        command: a key of `COMMANDS`.
        flags: name -> raw value, as typed; may hold `config` (a file), `preset` and `model_preset`.
    Raises:
        UserError: all problems at once.
    """
    taken = {name: frozenset(flags_of(name)) for name in COMMANDS}
    defaults = Config()
    given = layered(command, flags or {}, defaults.as_dict(), settings_by_name(), taken, user_edits())
    config, problems = defaults.changed(**given.values), given.problems
    config = dataclasses.replace(config, model_preset=given.model_preset, origins=tuple(given.origins.items()))
    problems += objective_problems(config, command)
    if command == "dpo":
        config = config.changed(objective=PREFERENCES)
    if (head := config.model.head) in HEADS:
        config = config.changed(objective=head)
    if head != TEXT:  # no head over the vocabulary: what is said of it in presets has no meaning
        decoder = config.model.num_decoder_layers if config.given("num_decoder_layers") else 0
        config = config.changed(num_decoder_layers=decoder, tie_word_embeddings=True, scale_decoder_outputs=True)
    has_data = config.data.train_file is not None or config.data.validation_file is not None
    if head in HEADS and has_data and "max_seq_len" in taken[command] and config.origin("max_seq_len") is None:
        config = config.changed(max_seq_len=MOST_TOKENS)  # nothing is cut unasked
    if head in HEADS and "eval_rows" in taken[command] and config.origin("eval_rows") is None:
        config = config.changed(eval_rows=HEAD_EVAL_ROWS)  # which take one forward pass each
    # a run's saved settings name every column, and its objective beside it
    names_text = config.given("text_column") and config.origin("objective") != "file" and "objective" in taken[command]
    if names_text and config.data.objective == AUTO and not config.train.is_finetune:
        config = config.changed(objective="span")  # whatever else the rows have
    if config.lora.lora_rank and config.origin("optimizer") is None:
        # adapters begin at zero, where steps scaled by a weight's size stand still
        config = config.changed(optimizer="adamw")
    # flags of a run that goes on stand over its saved settings, which are not read yet: `resumed_config` names their file
    if not problems and ("config" in (flags or {}) or config.train.is_keep_training is not True):
        problems += check(config)
    refuse(problems)
    return config


def training_command(saved: Mapping[str, Any]) -> str:
    """The command that a run with these saved settings was started with."""
    return "dpo" if saved.get("objective") == PREFERENCES else "train"
