"""The language in which the program speaks to its user: `say` makes a message; `languages/*.yaml` hold the
translations.

A message is an English sentence and the values that go into it. As a string it is English, which is what logs, JSON and
files get. It turns into the user's language where it is shown: by `print` and `str`, and by what lays text out for the
screen (`terminal`, `screen`). The English sentence is also the key of its translation; one without stays English.

So nothing is translated before it is shown, and a message must not be put into a text that is none: `say`, `join` and
`+` keep both languages, an f-string warns (`LanguageLost`), which the tests take for an error.
Source: the idea of GNU gettext, message ids in English, without its compiler.
"""

from __future__ import annotations

import locale
import os
import re
import sys
import warnings
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from functools import cache
from numbers import Number
from pathlib import Path
from typing import Any

ENGLISH = "en"
LANGUAGES = (ENGLISH, "zh")
FOLDER = Path(__file__).resolve().parent.parent / "languages"
_spoken = ENGLISH
_own: ContextVar[str | None] = ContextVar("language", default=None)  # The language of one request to a server.


class LanguageLost(UserWarning):
    """A message was put into a text by an f-string, where only its English is left."""


warnings.simplefilter("ignore", LanguageLost, append=True)  # Users are shown the English; tests raise it.


class Message(str):
    """A sentence with its values: English as a string, in the user's language where it is shown.

    Args:
        sentence: English, with `{name}` where a value goes. values: may be messages themselves.
    """

    sentence: str
    values: dict[str, Any]

    def __new__(cls, sentence: str, values: Mapping[str, Any]) -> Message:
        plain = {name: _picklable(value) for name, value in values.items()}
        message = super().__new__(cls, _filled(sentence, {name: english(value) for name, value in plain.items()}))
        message.sentence = sentence
        message.values = plain
        return message

    def in_language(self, language: str) -> str:
        """The message in one of `LANGUAGES`; English where its sentence has no translation."""
        translated = _words(language).get(self.sentence)
        if translated is None:
            return str(english(self))
        return _filled(translated, {name: in_language(value, language) for name, value in self.values.items()})

    def __str__(self) -> str:
        return self.in_language(spoken())

    def __format__(self, spec: str) -> str:
        warnings.warn("an f-string leaves only the English of a message: give it to say()", LanguageLost, stacklevel=2)
        return format(english(self), spec)

    def __add__(self, other: str) -> Message:
        return Joined("", (self, other))

    def __radd__(self, other: str) -> Message:
        return Joined("", (other, self))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.sentence, self.values)


class Joined(Message):
    """Texts, some of them messages, with a separator between them, which is translated too."""

    separator: str
    parts: tuple[str, ...]

    def __new__(cls, separator: str, parts: Iterable[str]) -> Joined:
        parts = tuple(parts)
        text = separator.join(english(part) for part in parts)
        message = str.__new__(cls, text)
        message.sentence = text
        message.values = {}
        message.separator = separator
        message.parts = parts
        return message

    def in_language(self, language: str) -> str:
        separator = translation(self.separator, language)
        return separator.join(in_language(part, language) for part in self.parts)

    def __reduce__(self) -> tuple[Any, ...]:
        return Joined, (self.separator, self.parts)


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


def say(sentence: str, /, **values: Any) -> Message:
    """A message: an English sentence, with `{name}` where a value goes, and its values, which may be messages
    themselves.
    """
    return Message(sentence, values)


def join(separator: str, parts: Iterable[str]) -> Message:
    """As `str.join`, of parts that may be messages; the separator is translated too."""
    return Joined(separator, parts)


def english(value: Any) -> Any:
    """The English of a message, as an ordinary string; anything else is returned as it is."""
    return str.__str__(value) if isinstance(value, Message) else value


def in_language(value: Any, language: str) -> Any:
    """A message in a language, as an ordinary string; anything else is returned as it is."""
    return value.in_language(language) if isinstance(value, Message) else value


def localized(content: Any) -> Any:
    """A copy of what JSON can hold with its messages in the user's language, for programs that show it, such as the
    page.
    """
    if isinstance(content, dict):
        return {key: localized(value) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [localized(value) for value in content]
    return in_language(content, spoken())


def translation(sentence: str, language: str) -> str:
    """A sentence in a language, whichever is in use; English where it has none."""
    return _words(language).get(sentence, sentence)


def spoken() -> str:
    """The language in use."""
    return _own.get() or _spoken


def _picklable(value: Any) -> Any:
    """A value as a message keeps it: numbers and texts as they are, and what an error says."""
    if isinstance(value, (str, Number)):
        return value
    if isinstance(value, BaseException) and value.args and isinstance(value.args[0], Message):
        return join("; ", value.args)
    return str(value)


def _filled(sentence: str, values: Mapping[str, Any]) -> str:
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
    """The language that the environment names, as POSIX reads it; English where the screen cannot show another.

    Windows sets no such variable: where none is set, its own setting counts.
    """
    variables = ("LC_ALL", "LC_MESSAGES", "LANG")
    setting = next((os.environ[name] for name in variables if os.environ.get(name)), "")
    if not setting and sys.platform == "win32":
        import ctypes

        # The language of Windows' own windows, such as zh_CN.
        number = ctypes.windll.kernel32.GetUserDefaultUILanguage()  # type: ignore[attr-defined,unused-ignore]
        setting = locale.windows_locale.get(number, "")
    if setting.split(".")[0] not in ("", "C", "POSIX"):
        setting = os.environ.get("LANGUAGE") or setting
    language = re.split("[-_.]", setting)[0].lower()
    if language not in LANGUAGES:
        return ENGLISH
    try:
        "中文".encode(getattr(sys.stdout, "encoding", None) or "utf8")
    except (LookupError, UnicodeEncodeError):
        return ENGLISH
    return language
