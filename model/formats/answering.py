"""Defaults of generation from a model's `generation_config.json`, which transformers heeds as well.

Where there is no such file, the same keys of `config.json` count, as in transformers. Every key is declared in
`settings.published_keys`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from model.formats.headers import read_json
from model.formats.shape_file import end_token
from settings.declared import GenerateConfig, settings_by_name
from settings.errors import UserError
from settings.fields import parse
from settings.published_keys import CONFIG, FILES, GENERATION, GENERATION_KEYS, check_keys
from support.language import say
from support.storage import atomic_file

GENERATION_FILE = GENERATION
ANSWERS_FILE = "answers.txt"  # The list that all answers come from, one a line.
SEARCH_SETTINGS = ("num_beams", "length_penalty", "early_stopping")  # Only a search reads these settings.
RANKED = "num_answers"  # An evaluation scores the best answers, this many of them.
DECODING_SETTINGS = (*SEARCH_SETTINGS, "repetition_penalty", "no_repeat_ngram_size", "split_prompts")
# What only sampling reads, with the defaults of transformers.
SAMPLING_DEFAULTS = {"temperature": 1.0, "top_k": 50, "top_p": 1.0}
# Setting -> the keys that say it, of which the first that is there counts.
_KEYS: dict[str, tuple[str, ...]] = {
    **{name: (name,) for name in (*DECODING_SETTINGS, RANKED)},
    "max_new_tokens": ("max_new_tokens", "max_length"),
    "min_new_tokens": ("min_new_tokens", "min_length"),
}
OLD_MAX_LENGTH = 20  # The default of transformers, which its first versions wrote into every config.json.
_WORDS = {"True": True, "False": False}  # Values of `early_stopping` that transformers reads as JSON's.


def _without_start(length: Any) -> Any:
    """A length that counts the start token, without it; what is no length is left to the setting's own check."""
    return max(0, length - 1) if type(length) is int else length


def _as_it_is(value: Any) -> Any:
    return value


_READERS: dict[str, Callable[[Any], Any]] = {
    "early_stopping": str,
    "max_length": _without_start,
    "min_length": _without_start,
}


def published_generation(folder: Path) -> tuple[Path, dict[str, Any]]:
    """The file of a model's folder that says how it generates, and what of it does; nothing where there is none.

    Raises:
        UserError: the file is broken.
    """
    path = folder / GENERATION
    if path.is_file():
        return path, read_json(path)
    content = _config(folder)
    tokens = {"eos_token_id", "decoder_start_token_id", "pad_token_id", "bos_token_id"}
    published = {name: content[name] for name in GENERATION_KEYS if name in content and name not in tokens}
    if published.get("max_length") == OLD_MAX_LENGTH:
        del published["max_length"]
    return folder / CONFIG, published


def _config(folder: Path) -> dict[str, Any]:
    """The values of `config.json`; none where there is no such file."""
    path = folder / CONFIG
    return _without_nulls(read_json(path)) if path.is_file() else {}


def _without_nulls(content: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in content.items() if value is not None}


def read_answer_settings(folder: Path, ignored: Collection[str] = ()) -> tuple[dict[str, Any], list[str]]:
    """The settings for decoding that a model's folder publishes, and the problems with those that cannot be used.

    Args:
        ignored: names of settings that are left out.
    """
    try:
        path, published = published_generation(folder)
        config = _config(folder)
    except UserError as error:
        return {}, error.problems
    values = _without_nulls(published)
    problems = [*check_keys(path, values, GENERATION_KEYS), *_other_tokens(path, values, config)]
    keys = _KEYS
    if values.get("do_sample") is True:
        values = {**SAMPLING_DEFAULTS, **values}
        keys = {**_KEYS, **{name: (name,) for name in SAMPLING_DEFAULTS}}
    settings: dict[str, Any] = {}
    for name, names in keys.items():
        key = next(filter(values.__contains__, names), None)
        if key is None or name in ignored:
            continue
        try:
            settings[name] = parse(settings_by_name()[name][1], _READERS.get(key, _as_it_is)(values[key]))
        except ValueError as error:
            problems.append(
                say("{path}: {key} = {value}, {error}", path=path, key=key, value=str(values[key])[:60], error=error)
            )
    return settings, problems


def unknown_keys(folder: Path) -> list[str]:
    """Keys in the files of a model's folder that nobody knows: file and names. Who reads a broken file says so."""
    lines = []
    for name, known_keys in FILES.items():
        with suppress(UserError):
            unknown = sorted(read_json(folder / name).keys() - known_keys.keys())
            if unknown:
                lines.append(f"{folder / name}: {', '.join(unknown)[:200]}")
    return lines


def _other_tokens(path: Path, values: Mapping[str, Any], config: Mapping[str, Any]) -> Iterator[str]:
    """Tokens that would start or end an answer otherwise than the model learnt, as far as its configuration is
    there.
    """
    if not config:
        return
    end = end_token(values.get("eos_token_id"))
    own = end_token(config.get("eos_token_id", 1))
    if isinstance(end, list):
        yield say(
            "{path}: eos_token_id = {ends}, an answer has one end token here; leave the model's own",
            path=path,
            ends=str(end)[:60],
        )
    elif end not in (None, own):
        yield say(
            "{path}: eos_token_id = {ends}, {config} has {own}; leave one in both",
            path=path,
            ends=str(end)[:60],
            config=CONFIG,
            own=own,
        )
    start = values.get("decoder_start_token_id")
    own_start = config.get("decoder_start_token_id", config.get("pad_token_id", 0))
    if start not in (None, own_start):
        yield say(
            "{path}: decoder_start_token_id = {start}, {config} has {known}; leave one in both",
            path=path,
            start=str(start)[:60],
            config=CONFIG,
            known=own_start,
        )


def answer_list_of(*folders: Path) -> Path | None:
    """The list of answers in the first folder that has one."""
    paths = (folder / ANSWERS_FILE for folder in folders)
    return next(filter(Path.is_file, paths), None)


def keep_answer_list(folder: Path, *sources: Path) -> None:
    """Copy the list of answers of the first of `sources` that has one; raises OSError."""
    path = answer_list_of(*sources)
    if path is not None:
        with atomic_file(folder / ANSWERS_FILE) as fresh:
            shutil.copyfile(path, fresh)


def keep_answers(folder: Path, settings: GenerateConfig, num_answers: int = 1) -> None:
    """Add how a model shall answer to the `generation_config.json` of its folder: the longest answer, and what is not
    default.

    Args:
        num_answers: that an evaluation scores of each prompt.
    Raises:
        OSError: the folder cannot be written.
    """
    path = folder / GENERATION
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf8")) if path.exists() else {}
    content["max_new_tokens"] = settings.max_new_tokens
    for name, value in other_than_default(settings).items():
        content[name] = _WORDS.get(value, value)
    if num_answers > 1:
        content[RANKED] = num_answers
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf8")


def other_than_default(settings: GenerateConfig) -> dict[str, Any]:
    """What a model can keep of how answers are sought."""
    return {
        name: getattr(settings, name)
        for name in DECODING_SETTINGS
        if getattr(settings, name) != getattr(GenerateConfig, name)
    }
