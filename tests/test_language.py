"""What is said in another language: every sentence is translated, with the same values, and programs still read
English.
"""

from __future__ import annotations

import ast
import copy
import json
import pickle
import string
from collections.abc import Iterable, Iterator
from functools import cache

import pytest
import yaml

from settings.declared import GROUPS, settings_by_name
from settings.errors import UserError
from settings.fields import counted
from settings.help import ABOUT, COMMAND_GROUPS, SHORT
from settings.precedence import aliases
from support.language import FOLDER, LANGUAGES, LanguageLost, english, join, localized, say, speak, spoken
from tests import sources
from training.report.log_files import plain
from training.report.summary import PHASES

# what makes a message of its sentence
MAKING = {"say", "Rule", "UserError", "DoesNotFit", "OverBudget", "RankFailed", "refuse", "Outside", "TalkFailed"}


@cache
def nodes() -> list[ast.AST]:
    """Calls and constants of all sources."""
    trees = sources.trees().values()
    return [node for tree in trees for node in ast.walk(tree) if isinstance(node, (ast.Call, ast.Constant))]


def calls(*names: str) -> Iterator[ast.Call]:
    for node in nodes():
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names:
            yield node


def sentences(call: ast.Call) -> Iterator[str]:
    """The sentences that a call makes a message of."""
    given = call.args[:1] if getattr(call.func, "id", "") == "say" else call.args
    for argument in given:
        for part in [argument.body, argument.orelse] if isinstance(argument, ast.IfExp) else [argument]:
            if isinstance(part, ast.Constant) and isinstance(part.value, str):
                yield part.value


def held() -> set[str]:
    """Sentences that a variable holds until they are said."""
    found = set[str]()
    for tree in sources.trees().values():
        for function in ast.walk(tree):
            if isinstance(function, ast.FunctionDef):
                parts = list(ast.walk(function))
                said = [
                    part.args[0]
                    for part in parts
                    if isinstance(part, ast.Call) and getattr(part.func, "id", "") in MAKING and part.args
                ]
                names = {name.id for name in said if isinstance(name, ast.Name)}
                given = [
                    part.value
                    for part in parts
                    if isinstance(part, ast.Assign) and getattr(part.targets[0], "id", "") in names
                ]
                found |= {
                    part.value
                    for value in given
                    for part in ast.walk(value)
                    if isinstance(part, ast.Constant) and " " in str(part.value).strip()
                }
    return found


def constants() -> set[str]:
    return {node.value for node in nodes() if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def fields(sentence: str) -> set[str]:
    return {name for _, name, _, _ in string.Formatter().parse(sentence) if name}


@pytest.fixture(params=[language for language in LANGUAGES if language != "en"])
def words(request: pytest.FixtureRequest) -> dict[str, str]:
    loaded: dict[str, str] = yaml.safe_load((FOLDER / f"{request.param}.yaml").read_text(encoding="utf8"))
    return loaded


def test_every_sentence_is_translated_once(words: dict[str, str]) -> None:
    said = {sentence for call in calls(*MAKING) for sentence in sentences(call)} | held()
    said |= {call.args[1].value for call in calls("counted") if isinstance(call.args[1], ast.Constant)}
    said |= {sentence for sentence in advice_of(aliases().values()) if sentence.removeprefix("write ").count(" ")}
    settings = {member.metadata["help"] for _, member in settings_by_name().values()}
    settings |= {
        member.metadata["derived"].text for _, member in settings_by_name().values() if member.metadata["derived"]
    }
    groups = {str(group.__doc__).splitlines()[0] for group in GROUPS.values()}
    said |= (
        settings | groups | {*ABOUT.values(), *COMMAND_GROUPS, *(task for tasks in SHORT.values() for task in tasks)}
    )
    assert not said - set(words)
    assert not set(words) - constants() - said - {f"in {phase}" for phase in PHASES}, "nobody says these any more"
    keys = [key.value for key, _ in yaml.compose((FOLDER / "zh.yaml").read_text(encoding="utf8")).value]
    assert len(keys) == len(set(keys))


def advice_of(meanings: Iterable[object]) -> Iterator[str]:
    """The sentences of `aliases.yaml`, which stand alone or by the value that was typed."""
    for meaning in meanings:
        if isinstance(meaning, dict):
            yield from advice_of(meaning.values())
        elif isinstance(meaning, str):
            yield meaning


def test_a_translation_takes_the_same_values(words: dict[str, str]) -> None:
    assert not {english for english, translated in words.items() if fields(english) != fields(translated)}
    given = {
        sentence: {word.arg for word in call.keywords}
        for call in calls(*MAKING)
        for sentence in sentences(call)
        if call.keywords
    }
    assert not {sentence for sentence, names in given.items() if None not in names and fields(sentence) != names}


def test_a_message_is_english_and_shown_in_the_language_of_its_reader(capsys: pytest.CaptureFixture[str]) -> None:
    said = say("{peak} of {budget}", peak=counted(2, "row"), budget=counted(1, "marble"))
    listed = join("; ", [said, "x"])
    speak("zh")
    assert said == english(said) == "2 rows of 1 marble" and str(said) == "2 行，预算 1 marble"
    assert english(listed) == "2 rows of 1 marble; x" and str(listed) == "2 行，预算 1 marble；x" and english(5) == 5
    assert str("  " + said + "!") == "  2 行，预算 1 marble!"
    assert str(say("nobody translated {what}", what=counted(3, "row"))) == "nobody translated 3 rows"
    for message in (said, listed, counted(2, "row"), "" + said):
        for copied in (pickle.loads(pickle.dumps(message)), copy.deepcopy(message)):
            assert str(copied) == str(message) and english(copied) == english(message)
    assert json.dumps(plain({"report": said})) == json.dumps({"report": said}) == '{"report": "2 rows of 1 marble"}'
    assert localized({"problems": [said]}) == {"problems": ["2 行，预算 1 marble"]}
    print(said)
    assert capsys.readouterr().out == "2 行，预算 1 marble\n"
    with pytest.raises(LanguageLost):
        f"{said}!"


def test_an_error_keeps_both_languages() -> None:
    error = UserError(
        "{setting}, needs the package {package}, which is not installed; run: {install}",
        setting="--format",
        package="gguf",
        install="pip",
    )
    error = UserError(*error.problems, "nobody translated this")
    speak("zh")
    for copied in (error, pickle.loads(pickle.dumps(error)), UserError(*error.problems)):
        assert copied.problems[0] == "--format, needs the package gguf, which is not installed; run: pip"
        assert str(copied) == "--format：需要 gguf 包，这里没有安装；请运行：pip\nnobody translated this"
    within = say("--metric_for_best = {best}, {problem}", best="x", problem=error)
    assert str(within).startswith("--metric_for_best = x：--format：需要") and "needs the package" in within


@pytest.mark.parametrize(
    ("variables", "language"),
    [
        ({"LANG": "zh_CN.UTF-8"}, "zh"),
        ({"LANG": "en_US.UTF-8", "LANGUAGE": "zh_CN:en"}, "zh"),
        ({}, "en"),
    ],
)
def test_auto_asks_the_environment(variables: dict[str, str], language: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LC_ALL", "LC_MESSAGES", "LANG", "LANGUAGE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.stdout", type("Screen", (), {"encoding": "utf-8"}))
    assert speak("auto") == spoken() == language
    assert speak("zh") == "zh" and speak("en") == "en"
    monkeypatch.setattr("sys.stdout", type("Screen", (), {"encoding": "ascii"}))
    assert speak("auto") == "en", "a screen that has no such letters"
