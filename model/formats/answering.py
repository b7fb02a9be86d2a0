"""Defaults of generation from a model's `generation_config.json`, which transformers heeds as well.

Where there is no such file, the same keys of `config.json` count, as in transformers. Every key is declared in
`settings.published_keys`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from language import say
from model.formats.headers import read_json
from settings.declared import GenerateConfig, settings_by_name
from settings.errors import UserError
from settings.fields import parse
from settings.published_keys import CONFIG, FILES, GENERATION, GENERATION_KEYS, check_keys
from storage import atomic_file

GENERATION_FILE = GENERATION
ANSWERS_FILE = "answers.txt"  # the list that all answers come from, one a line
SEARCH = ("num_beams", "length_penalty", "early_stopping")  # what a search alone heeds
RANKED = "num_answers"  # how many of the best answers an evaluation scores
HEEDED = (*SEARCH, "repetition_penalty", "no_repeat_ngram_size", "split_prompts")
# what drawing heeds, and transformers' values where none are said
DRAWN = {"temperature": 1.0, "top_k": 50, "top_p": 1.0}
LENGTHS = {"max_new_tokens": "max_length", "min_new_tokens": "min_length"}  # the second counts the start token
OLD_MAX_LENGTH = 20  # transformers' default, which its first versions wrote into every config.json
_WORDS = {"True": True, "False": False}  # of `early_stopping`, which transformers reads as JSON's


def published_generation(folder: Path) -> tuple[Path, dict[str, Any]]:
    """The file of a model's folder that says how it generates, and what of it does; nothing where there is none.

    Raises:
        UserError: the file is broken.
    """
    path = folder / GENERATION
    if path.is_file():
        return path, read_json(path)
    path = folder / CONFIG
    content = read_json(path) if path.is_file() else {}
    tokens = ("eos_token_id", "decoder_start_token_id", "pad_token_id", "bos_token_id")
    found = {name: content[name] for name in GENERATION_KEYS if name in content and name not in tokens}
    if found.get("max_length") == OLD_MAX_LENGTH:
        del found["max_length"]
    return path, found


def answers_by(folder: Path, given: Collection[str] = ()) -> tuple[dict[str, Any], list[str]]:
    """The settings of answers that a model's folder names; and what cannot be done by it.

    Args:
        given: settings that the user has named, which go before the file's.
    """
    try:
        path, published = published_generation(folder)
        shape = read_json(folder / CONFIG) if (folder / CONFIG).is_file() else None
    except UserError as error:
        return {}, error.problems
    named = {name: value for name, value in published.items() if value is not None}
    problems = check_keys(path, named, GENERATION_KEYS)
    problems += [] if shape is None else _other_tokens(path, named, shape)
    asked = {name: (name, named[name]) for name in (*HEEDED, RANKED) if name in named}
    for name, with_start in LENGTHS.items():
        if name in named:
            asked[name] = (name, named[name])
        elif type(named.get(with_start)) is int and (name == "max_new_tokens" or named[with_start] > 0):
            asked[name] = (with_start, named[with_start] - 1)
        elif with_start in named and named[with_start] != 0 and name not in given:
            problems.append(
                say(
                    "{path}: {with_start} = {named}, must be a whole number",
                    path=path,
                    with_start=with_start,
                    named=str(named[with_start])[:60],
                )
            )
    if named.get("do_sample") is True:
        asked |= {name: (name, named.get(name, value)) for name, value in DRAWN.items()}
    found = dict[str, Any]()
    for name, (key, value) in asked.items():
        if name in given:
            continue
        try:
            found[name] = parse(settings_by_name()[name][1], str(value) if name == "early_stopping" else value)
        except ValueError as error:
            problems.append(
                say("{path}: {key} = {value}, {error}", path=path, key=key, value=named.get(key, value), error=error)
            )
    return found, problems


def remarks(folder: Path) -> list[str]:
    """Keys in the files of a model's folder that nobody knows: file and names. Who reads a broken file says so."""
    told = []
    for path in map(folder.joinpath, FILES):
        with suppress(UserError):
            if path.is_file() and (names := sorted(read_json(path).keys() - FILES[path.name].keys())):
                told.append(f"{path}: {', '.join(names)[:200]}")
    return told


def _other_tokens(path: Path, named: Mapping[str, Any], shape: Mapping[str, Any]) -> list[str]:
    """Tokens that would start or end an answer otherwise than the model learnt."""
    problems: list[str] = []
    ends, own = named.get("eos_token_id"), shape.get("eos_token_id", 1)
    ends, own = (list(dict.fromkeys(ids)) if isinstance(ids, list) else [ids] for ids in (ends, own))
    if len(ends) > 1:
        problems.append(
            say(
                "{path}: eos_token_id = {ends}, an answer has one end token here; leave the model's own",
                path=path,
                ends=str(ends)[:60],
            )
        )
    elif ends != [None] and ends != own:
        problems.append(
            say(
                "{path}: eos_token_id = {ends}, {config} has {own}; leave one in both",
                path=path,
                ends=str(ends[0])[:60],
                config=CONFIG,
                own=own[0],
            )
        )
    start, pad = named.get("decoder_start_token_id"), shape.get("pad_token_id")
    known = shape.get("decoder_start_token_id")
    known = (0 if pad is None else pad) if known is None else known
    if start is not None and start != known:
        problems.append(
            say(
                "{path}: decoder_start_token_id = {start}, {config} has {known}; leave one in both",
                path=path,
                start=str(start)[:60],
                config=CONFIG,
                known=known,
            )
        )
    return problems


def answer_list_of(*folders: Path) -> Path | None:
    """The list of answers in the first folder that has one."""
    return next((path for folder in folders if (path := folder / ANSWERS_FILE).is_file()), None)


def keep_answer_list(folder: Path, *sources: Path) -> None:
    """Copy the list of answers of the first of `sources` that has one; raises OSError."""
    if (path := answer_list_of(*sources)) is not None:
        with atomic_file(folder / ANSWERS_FILE) as fresh:
            shutil.copyfile(path, fresh)


def keep_answers(folder: Path, settings: GenerateConfig, num_answers: int = 1) -> None:
    """Add how a model shall answer to the `generation_config.json` of its folder: the longest answer, and what is not default.

    Args:
        num_answers: that an evaluation scores of each prompt.
    Raises:
        OSError: the folder cannot be written.
    """
    path = folder / GENERATION
    there: Mapping[str, Any] = json.loads(path.read_text(encoding="utf8")) if path.exists() else {}
    kept = {name: _WORDS.get(value, value) for name, value in other_than_default(settings).items()}
    kept |= {RANKED: num_answers} if num_answers > 1 else {}
    content = {**there, "max_new_tokens": settings.max_new_tokens, **kept}
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf8")


def other_than_default(settings: GenerateConfig) -> dict[str, Any]:
    """What a model can keep of how answers are sought."""
    return {name: value for name in HEEDED if (value := getattr(settings, name)) != getattr(GenerateConfig, name)}
