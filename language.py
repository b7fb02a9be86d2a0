"""The language in which the program speaks to its user: `say` translates a sentence; `languages/*.yaml` hold the words.

The code holds English, which is also the key: `say("peak {size}", size=size)` looks its sentence up in the chosen language
and puts the values in. A sentence that has no translation stays English. What was said remembers its English, so that the
log and files for programs (`english`) read the same for everybody; a test holds that every sentence is translated.
Source: the idea of GNU gettext, message ids in English, without its compiler.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Any

ENGLISH = "en"
LANGUAGES = (ENGLISH, "zh")
FOLDER = Path(__file__).resolve().parent / "languages"
_spoken = ENGLISH
_own: ContextVar[str | None] = ContextVar("language", default=None)  # of one request to a server


class Said(str):
    """Text in the user's language; `english` is the same in English.

    Inside an ordinary f-string it turns English, so that no sentence mixes two languages: one is translated whole, by
    `say`, or not at all.
    """

    english: str

    def __new__(cls, text: str, in_english: str) -> Said:
        said = super().__new__(cls, text)
        said.english = in_english
        return said

    def __getnewargs__(self) -> tuple[str, str]:  # type: ignore[override]
        return str.__str__(self), self.english

    def __format__(self, spec: str) -> str:
        return format(self.english, spec)


def speak(language: str) -> str:
    """Choose the language for the rest of the process.

    Args:
        language: one of `LANGUAGES`; any other word, such as auto: the environment's.
    Returns:
        the language chosen.
    """
    global _spoken
    _spoken = language if language in LANGUAGES else _of_environment()
    return _spoken


def speak_here(language: str) -> None:
    """Choose one of `LANGUAGES` for the current context alone, as for one request to a server."""
    _own.set(language)


def say(sentence: str, /, **values: Any) -> Said:
    """A sentence in the user's language, its values put in.

    Args:
        sentence: English, with `{name}` where a value goes. values: may be `Said` themselves.
    """
    translated = _words(spoken()).get(sentence)
    in_english = _filled(sentence, values)  # of what was said, English is formatted
    if translated is None:
        return Said(in_english, in_english)
    return Said(_filled(translated, {name: _shown(value) for name, value in values.items()}), in_english)


def join(separator: str, parts: Iterable[str]) -> Said:
    """As `str.join`, of parts that may be `Said`; the separator is translated too."""
    parts = list(parts)
    return Said(str.__str__(say(separator)).join(parts), separator.join(english(part) for part in parts))


def english(value: Any) -> Any:
    """What was said, in English; anything else is returned as it is."""
    return value.english if isinstance(value, Said) else value


def translation(sentence: str, language: str) -> str:
    """A sentence in a language, whichever is in use; English where it has none."""
    return _words(language).get(sentence, sentence)


def spoken() -> str:
    """The language in use."""
    return _own.get() or _spoken


def _shown(value: Any) -> Any:
    return str.__str__(value) if isinstance(value, Said) else value


def _filled(sentence: str, values: dict[str, Any]) -> str:
    return sentence.format(**values) if values else sentence


@cache
def _words(language: str) -> dict[str, str]:
    """English sentence -> sentence."""
    if language == ENGLISH:
        return {}
    import yaml

    words: dict[str, str] = yaml.safe_load((FOLDER / f"{language}.yaml").read_text(encoding="utf8"))
    return words


def _of_environment() -> str:
    """The language that the environment names, as POSIX reads it; English where the screen cannot show another."""
    variables = ("LC_ALL", "LC_MESSAGES", "LANG")
    named = next((os.environ[name] for name in variables if os.environ.get(name)), "")
    if named.split(".")[0] not in ("", "C", "POSIX"):
        named = os.environ.get("LANGUAGE") or named
    language = named.replace("-", "_").split("_")[0].split(".")[0].lower()
    if language not in LANGUAGES or language == ENGLISH:
        return ENGLISH
    try:
        "中文".encode(getattr(sys.stdout, "encoding", None) or "utf8")
    except (LookupError, UnicodeEncodeError):
        return ENGLISH
    return language
