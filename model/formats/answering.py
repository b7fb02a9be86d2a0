"""How does a model answer where nobody says? By what its `generation_config.json` holds, which transformers heeds as well.

Heeded are the settings of a search and of repetition. What draws tokens is not: the same question has the same answer here,
unless somebody asks for other ones.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from config import GenerateConfig, load
from model.formats.headers import read_json
from settings.fields import UserError

GENERATION_FILE = "generation_config.json"
SEARCH = ("num_beams", "length_penalty", "early_stopping")  # what a search alone heeds
HEEDED = (*SEARCH, "repetition_penalty", "no_repeat_ngram_size")
_WORDS = {"True": True, "False": False}  # of `early_stopping`, which transformers reads as JSON's


def answers_by(folder: Path) -> tuple[dict[str, Any], list[str]]:
    """The settings that a model's folder names, as `config.GenerateConfig` has them; and what is wrong with others, which are
    passed over.
    """
    path = folder / GENERATION_FILE
    if not path.is_file():
        return {}, []
    found, problems = dict[str, Any](), list[str]()
    try:
        published = read_json(path)
    except UserError as error:
        return {}, error.problems
    named = {name: value for name, value in published.items() if name in HEEDED and value is not None}
    ends = published.get("eos_token_id")
    if isinstance(ends, list) and len(ends) > 1:
        problems.append(f"{path}: eos_token_id = {str(ends)[:60]}, an answer has one end token here, the model's own")
    for name, value in named.items():
        try:
            found[name] = getattr(load("generate", {name: str(value)}).generate, name)
        except UserError as error:
            problems += [f"{path}: {problem.removeprefix('--')}" for problem in error.problems]
    return found, problems


def keep_answers(folder: Path, settings: GenerateConfig) -> None:
    """Add how a model shall answer to the `generation_config.json` of its folder, as far as that is not the default.

    Raises:
        OSError: the folder cannot be written.
    """
    path, named = folder / GENERATION_FILE, other_than_default(settings)
    if named:
        there: Mapping[str, Any] = json.loads(path.read_text(encoding="utf8")) if path.exists() else {}
        told = {name: _WORDS.get(value, value) for name, value in named.items()}
        path.write_text(json.dumps({**there, **told}, indent=2) + "\n", encoding="utf8")


def other_than_default(settings: GenerateConfig) -> dict[str, Any]:
    """What a model can keep of how answers are written."""
    return {name: value for name in HEEDED if (value := getattr(settings, name)) != getattr(GenerateConfig, name)}
