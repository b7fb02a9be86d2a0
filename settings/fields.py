"""Declaration, parsing, checks and display of settings.

Every setting of the program is a dataclass field made by `setting(...)` in `settings/declared.py`. From that one
declaration come the command-line flag, the `--help` line, the check of its value, the file format and
`docs/settings.md`. Problems are gathered, never raised one by one: a user should repair a command once, not once per
mistake.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from settings.errors import UserError, reason_of, refuse
from support.language import Message, english, join, say, translation
from support.storage import read_bytes
from support.units import format_size, parse_size

AUTO = "auto"
# Likeness of two words, as difflib counts it: a slip of the keyboard leaves more, tokenizer_type of torch_dtype less.
LEAST_LIKENESS = 0.72
TRUE_WORDS = ("true", "yes", "on", "1")
FALSE_WORDS = ("false", "no", "off", "0")
LONGEST_NUMBER_BITS = 1024  # A whole number that is longer is no float either.
NOT_A_NUMBER = {int: "is not a whole number; allowed: {allowed}", float: "is not a number; allowed: {allowed}"}
FEWEST_BYTES = 1024  # A smaller number without a unit was meant to have one.
NOTHING_WORDS = ("none", "null", "")
Auto = str  # `int | Auto`: a whole number, or the word with which the program decides
Text = str  # It keeps its blanks.
Size = int  # It counts bytes, and is written as 6G, 512M, 6GiB.
KINDS: dict[str, Any] = {"bool": bool, "int": int, "float": float, "str": str, "Text": "text", "Size": "size"}


@dataclasses.dataclass(frozen=True)
class Need:
    """Another setting without which a setting has no effect.

    Args:
        name: of the other setting. words: the values with which the setting has an effect; (): any but the default and
            0.
    """

    name: str
    words: tuple[str, ...] = ()

    @classmethod
    def of(cls, text: str) -> Need:
        """A need as it is written in a declaration: `lora_rank`, or `head=sequence|token`."""
        name, _, words = text.partition("=")
        return cls(name, tuple(words.split("|")) if words else ())

    def __str__(self) -> str:
        return f"{self.name}={'|'.join(self.words)}" if self.words else self.name

    def allows(self, value: Any, default: Any) -> bool:
        """Whether the setting has an effect while the other one has this value."""
        if self.words:
            return ("none" if value is None else str(value)) in (*self.words, AUTO)
        return value not in (default, 0, None)


@dataclasses.dataclass(frozen=True)
class Derived:
    """A default that depends on other settings.

    Args:
        text: what `--help` says of it beside the plain default, such as "adamw with adapters".
        value: a function of all settings (`settings.consistency.view`) that gives the default of one that the user has
            not named.
    """

    text: str
    value: Callable[[Any], Any]


def setting(
    default: Any,
    help: str,
    *,
    unit: str = "",
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    choices: tuple[str, ...] = (),
    defines: bool = False,
    is_place: bool = False,
    needs: str | tuple[str, ...] = (),
    derived: Derived | None = None,
) -> Any:
    """Declare one setting as a dataclass field; its annotation says what it takes: `int | Auto`, `Size | None`.

    Args:
        default: value used when nobody names another.
        help: one line, shown by `--help`.
        unit: shown after the value, e.g. "tokens".
        low, high: inclusive range; above: exclusive lower bound.
        choices: the only allowed words.
        defines: whether a run is another one with another value; where it goes on, it keeps its own. What makes a run
            longer, slower, tidier or smaller, and the course of its learning rate, does not define it.
        is_place: whether it says where this start reads and writes; a run's folder, which may be someone else's, does
            not.
        needs: other settings without which it has no effect: `"lora_rank"`, which has to be on, or
            `"head=sequence|token"`, which has to have one of these values.
        derived: the default where another setting decides it.
    """
    facts = dict(help=help, kind=None, unit=unit, low=low, high=high, above=above, choices=choices)
    allows = dict(auto=None, optional=None, defines=defines, is_place=is_place)
    needed = tuple(map(Need.of, (needs,) if isinstance(needs, str) else needs))
    return dataclasses.field(default=default, metadata={**facts, **allows, "needs": needed, "derived": derived})


defining = partial(setting, defines=True)


def declared(member: dataclasses.Field[Any]) -> dataclasses.Field[Any]:
    """A setting with `kind`, `auto` and `optional` as its annotation says."""
    kind, *alternatives = str(member.type).split(" | ")
    facts = {**member.metadata, "kind": KINDS[kind], "auto": "Auto" in alternatives, "optional": "None" in alternatives}
    whole: dataclasses.Field[Any] = dataclasses.field(default=member.default, metadata=facts)
    whole.name = member.name
    return whole


def parse(field: dataclasses.Field[Any], value: Any) -> Any:
    """Turn a raw value (a flag's text, a YAML scalar) into the setting's type.

    Raises:
        ValueError: with a sentence that begins after `name = value, `.
    """
    facts = field.metadata
    word = value.strip().lower() if isinstance(value, str) else value
    if facts["optional"] and (word is None or word in NOTHING_WORDS):
        return None
    if facts["auto"] and word == AUTO:
        return AUTO
    parsed = PARSERS[facts["kind"]](facts, value)
    if facts["choices"]:
        return _choice(facts["choices"], parsed)
    if facts["kind"] in (int, float) and not _is_in_range(facts, parsed):
        raise ValueError(say("is out of range; allowed: {allowed}", allowed=allowed(facts)))
    return at_home(parsed) if facts["is_place"] else parsed


def _choice(choices: tuple[str, ...], parsed: str) -> str:
    """The choice that is meant, in whatever case it is written."""
    for choice in choices:
        if choice.lower() == parsed.lower():
            return choice
    raise ValueError(not_known(parsed, choices))


def _is_in_range(facts: Mapping[str, Any], number: float) -> bool:
    is_least = facts["low"] is None or number >= facts["low"]
    is_most = facts["high"] is None or number <= facts["high"]
    return is_least and is_most and (facts["above"] is None or number > facts["above"])


def at_home(path: str) -> str:
    """A path with the user's folder for a ~, which bash leaves alone in --cache_dir=~/cache, and YAML; a path that
    exists stays as it is.
    """
    return path if os.path.lexists(path) else os.path.expanduser(path)


def not_known(word: str, allowed_words: Iterable[str]) -> str:
    """Say that a word is none of those that are allowed, and which one is near."""
    hint = nearest(word, allowed_words)
    return say("is not known; allowed: {known}{hint}", known=join(", ", allowed_words), hint=hint)


def nearest(word: str, allowed_words: Iterable[str], hint: str = "; did you mean {near}?") -> str:
    """Say which word is most like a mistyped one, or holds one that was cut short; empty where none is."""
    for near in difflib.get_close_matches(word, list(allowed_words), n=1):
        letters = word.replace("_", "")
        near_letters = near.replace("_", "")
        is_part = letters in near_letters or near_letters in letters
        if is_part or difflib.SequenceMatcher(None, near, word).ratio() >= LEAST_LIKENESS:
            return say(hint, near=near)
    return ""


def near_path(missing: str | Path, is_alike: Callable[[Path], bool] = Path.is_dir) -> str:
    """Say which folder, or file, beside a path that does not exist is called most like it; empty where none is."""
    path = Path(missing)
    names = list[str]()
    with suppress(OSError):
        names = [sibling.name for sibling in islice(path.parent.iterdir(), 1000) if is_alike(sibling)]
    near = difflib.get_close_matches(path.name, names, n=1)
    return say("; did you mean {near}?", near=path.with_name(near[0])) if near else ""


def is_encodable(text: str) -> bool:
    """Whether a text holds no half of a surrogate pair, which is in no UTF-8."""
    try:
        text.encode("utf8")
    except UnicodeEncodeError:
        return False
    return True


def _truth(facts: Mapping[str, Any], value: Any) -> bool:
    word = str(value).strip().lower()
    if word in TRUE_WORDS + FALSE_WORDS:
        return word in TRUE_WORDS
    further = ", auto" if facts["auto"] else ""
    raise ValueError(say("is neither true nor false; allowed: True, False, yes, no, 1, 0{further}", further=further))


def _text(facts: Mapping[str, Any], value: Any) -> str:
    text = str(value)
    if not is_encodable(text):
        raise ValueError(say("is not UTF-8; rename it, or set a UTF-8 locale such as LC_ALL=C.UTF-8"))
    return text


def _stripped(facts: Mapping[str, Any], value: Any) -> str:
    return _text(facts, value).strip()


def _number(facts: Mapping[str, Any], value: Any) -> float:
    if isinstance(value, bool):
        raise ValueError(say("needs a value"))
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(say(NOT_A_NUMBER[facts["kind"]], allowed=allowed(facts))) from None
    if not math.isfinite(number):
        raise ValueError(say("is not a finite number; allowed: {allowed}", allowed=allowed(facts)))
    return number


def _whole(facts: Mapping[str, Any], value: Any) -> int:
    number = _number(facts, value)
    if number != int(number):
        raise ValueError(say(NOT_A_NUMBER[int], allowed=allowed(facts)))
    with suppress(ValueError):
        return int(value)  # A number of more digits than a float has, as it was typed.
    return int(number)


def _size(facts: Mapping[str, Any], value: Any) -> int:
    try:
        size = parse_size(value)
    except (ValueError, OverflowError):
        raise ValueError(say("is not a size above 0; write it as 6G, 512M, 1.5GiB or a number of bytes")) from None
    word = str(value).strip()
    if size < FEWEST_BYTES and re.fullmatch(r"[\d.]+", word):
        unit = "G" if float(word) < 64 else "M"
        text = "means {size} bytes; did you mean {word}{unit}? Write the unit with it"
        raise ValueError(say(text, size=size, word=word, unit=unit))
    return size


# How a raw value becomes one of a kind: functions of the setting's facts and the value, which raise a ValueError.
PARSERS: dict[Any, Callable[[Mapping[str, Any], Any], Any]] = {
    bool: _truth,
    int: _whole,
    float: _number,
    str: _stripped,
    "text": _text,
    "size": _size,
}
# The values of a kind in words, where no range or choice says it better.
KIND_WORDS: dict[Any, str] = {
    bool: "True | False",
    int: "a number",
    float: "a number",
    str: "text",
    "text": "text",
    "size": "a size such as 6G or 512M",
}


def allowed(facts: Mapping[str, Any]) -> str:
    """Say in words which values a setting takes, e.g. `auto or 1 or more, rows`."""
    words: list[str] = ["auto"] * facts["auto"]
    if facts["choices"]:
        words.append(" | ".join(choice for choice in facts["choices"] if choice != AUTO))
    elif facts["above"] is not None or facts["low"] is not None:
        words.append(_range_words(facts))
    else:
        words.append(say(KIND_WORDS[facts["kind"]]))
    words += ["none"] * facts["optional"]
    values = join(say(" or "), words)
    return say("{values}, {unit}", values=values, unit=say(facts["unit"])) if facts["unit"] else values


def _range_words(facts: Mapping[str, Any]) -> str:
    is_above = facts["above"] is not None
    texts = {
        (True, False): "more than {least}",
        (True, True): "more than {least} up to {most}",
        (False, False): "{least} or more",
        (False, True): "{least} to {most}",
    }
    least = str(facts["above" if is_above else "low"]).removesuffix(".0")
    most = str(facts["high"]).removesuffix(".0")
    return say(texts[is_above, facts["high"] is not None], least=least, most=most)


def show(field: dataclasses.Field[Any], value: Any) -> str:
    """Render a value as a user would type it."""
    return format_size(value) if field.metadata["kind"] == "size" and isinstance(value, int) else str(value)


class Counted(Message):
    """A number of things, of which English has a plural."""

    def in_language(self, language: str) -> str:
        noun = translation(self.values["noun"], language)
        return english(self) if noun == self.values["noun"] else f"{self.values['number']:,} {noun}"


def counted(number: int, noun: str) -> Message:
    """Show a number of things: `1 row`, `2,249 rows`, `2 processes`; in the user's language where it has the noun."""
    ending = "es" if noun.endswith(("s", "ch")) else "s"
    words = noun if number == 1 else noun + ending
    return Counted(f"{{number:,}} {words}", {"number": number, "noun": noun})


def listed(names: Iterable[object], most: int = 20) -> str:
    """Names in a row, of which a file may hold any number, of any length: `a, b, c and 1,980 more`."""
    words = [name if isinstance(name, Message) else str(name) for name in names]
    first = join(", ", (word if len(word) <= 60 else f"{english(word)[:60]}..." for word in words[:most]))
    if len(words) <= most:
        return first
    return say("{names} and {count} more", names=first, count=f"{len(words) - most:,}")


def read_settings_file(path: Path, groups: Iterable[str] = ()) -> dict[str, Any]:
    """Read a YAML or JSON table of settings. It may sort them into groups; names are unique, so the groups are dropped.

    Raises:
        UserError: the file is missing, unreadable or no table.
    """
    import yaml

    try:
        content = yaml.safe_load(read_bytes(path, may_wait=True).decode("utf8"))  # JSON is YAML.
    except FileNotFoundError:
        raise UserError("--config = {path}, no such file; give a YAML or JSON file of settings", path=path) from None
    except Exception as error:  # For a wrong date, or a number of 5000 digits, yaml lets Python's own errors pass.
        mark = getattr(error, "problem_mark", None)
        wrong = " ".join(str(getattr(error, "problem", None) or reason_of(error)).split())[:200]
        line = say("line {number}: ", number=mark.line + 1) if mark else ""
        raise UserError(
            "--config = {path}, cannot be read: {wrong}; give a YAML or JSON file of settings",
            path=path,
            wrong=line + wrong,
        ) from None
    if not isinstance(content, dict):
        raise UserError("--config = {path}, is not a table of name: value lines; write it so", path=path)
    flat: dict[str, Any] = {}
    for key, value in content.items():
        flat.update(value if key in groups and isinstance(value, Mapping) else {key: value})
    mistakes = [_mistake(key, value) for key, value in flat.items()]
    refuse([say("--config = {path}, {wrong}", path=path, wrong=mistake) for mistake in mistakes if mistake])
    return flat


def _mistake(key: object, value: object) -> str:
    """What no line of a table of settings can be, whatever its name; empty: nothing."""
    for number in (key, value):
        if isinstance(number, int) and number.bit_length() > LONGEST_NUMBER_BITS:  # Python itself refuses to show it.
            return say(
                "holds a whole number of {bit_length:,} bits; write one that a setting can have",
                bit_length=number.bit_length(),
            )
    if isinstance(key, str):
        return ""
    return say("the name {key} is {kind}, not a text; quote it, or fix it", key=str(key)[:40], kind=type(key).__name__)
