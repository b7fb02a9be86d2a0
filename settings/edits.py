"""What the user has changed in `config.py`, read from its text.

`config.py` shows every setting with a plain value in the class that guides name, so that it may be edited as printed: a
line changed in place, with or without annotation; lines added anywhere in a class; a class replaced by a few lines or
by comments alone; a whole class pasted at the end of the file. The text is parsed, never run, so that each edit is
known by its line and a mistake is one sentence. `trainer_low_mem.py` holds one such line too, `use_ultra_low_mem`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from settings.fields import AUTO, nearest
from support.language import say

CONFIG_FILE = "config.py"
TRAINER_FILE = "trainer_low_mem.py"
TRAINER_LINE = "use_ultra_low_mem"
MODEL_CLASS = "T5ModelConfig"
TRAIN_CLASS = "TrainConfig"


@dataclass(frozen=True)
class Shipped:
    """A setting as the program came: the class of `config.py` that shows it, and its default."""

    class_name: str
    default: Any


@dataclass(frozen=True)
class Edit:
    """One line that gives a setting a value.

    Args:
        line: its number in `file`, from 1. wrong: why its value is none that a setting can have; empty: it is.
    """

    name: str
    value: Any
    file: str
    line: int
    wrong: str = ""

    @property
    def place(self) -> str:
        """The file and the line, as a message names them."""
        return say("{file} line {line}", file=self.file, line=self.line)

    def problem(self, wrong: object) -> str:
        """A sentence about this line."""
        return say(
            "{place}: {name} = {value}, {wrong}", place=self.place, name=self.name, value=self.value, wrong=wrong
        )


@dataclass(frozen=True)
class Edits:
    """All edits by the name of the setting, and what is wrong with lines that cannot act."""

    by_name: Mapping[str, Edit]
    problems: tuple[str, ...]


def edits_of_config(text: bytes, shipped: Mapping[str, Shipped]) -> Edits:
    """The edits in the text of a `config.py`.

    A line is an edit where its value is not the default or stands in another class than it came in, and in a class that
    somebody has written. Of several edits of a setting the last one counts.

    Args:
        shipped: setting -> its class and default.
    """
    try:
        tree = ast.parse(_with_bodies(text.decode("utf-8-sig")))
    except UnicodeDecodeError:
        return Edits({}, (say("{file}: is not UTF-8; save it as UTF-8", file=CONFIG_FILE),))
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None) or 1
        sentence = "{file} line {line}: cannot be read as Python ({reason}); correct it"
        return Edits({}, (say(sentence, file=CONFIG_FILE, line=line, reason=getattr(error, "msg", error)),))
    by_name: dict[str, Edit] = {}
    problems: list[str] = []
    class_names: set[str] = set()
    for class_name, lines in _blocks(tree):
        own_names = {name for name, origin in shipped.items() if origin.class_name == class_name}
        # Few of a class's settings, or the class a second time: somebody has written all of these lines.
        is_rewritten = 2 * len(own_names & {edit.name for edit in lines}) < len(own_names)
        is_written_by_user = is_rewritten or class_name in class_names
        class_names.add(class_name)
        for edit in lines:
            if not class_name and not (edit.name in shipped or nearest(edit.name, shipped)):
                continue  # A name beside the classes may be there for their lines to use.
            wrong = edit.wrong or _misplaced(edit.name, class_name, shipped)
            if wrong:
                problems.append(edit.problem(wrong))
                continue
            default = shipped[edit.name].default
            is_default = edit.value == default and isinstance(edit.value, bool) == isinstance(default, bool)
            if not is_default or is_written_by_user or edit.name not in own_names:
                by_name[edit.name] = edit
    return Edits(by_name, tuple(problems))


def edit_of_trainer(text: bytes) -> Edit | None:
    """The value of `use_ultra_low_mem` in the text of `trainer_low_mem.py`, where somebody has changed it."""
    edit = None
    for number, line in enumerate(text.decode("utf8", "replace").splitlines(), start=1):
        match = re.match(rf"\s*{TRAINER_LINE}\s*(?::[^=]*)?=([^=#]+)", line)
        if match:
            value = match[1].strip().strip("'\"")
            edit = None if value == AUTO else Edit("ultra_low_mem", value, TRAINER_FILE, number)
    return edit


def _blocks(tree: ast.Module) -> Iterator[tuple[str, list[Edit]]]:
    """The name of each class and its lines; those outside of all classes have an empty one."""
    names: dict[str, Any] = {}
    for statement in tree.body:
        if isinstance(statement, ast.ClassDef):
            yield statement.name, _lines(statement.body, dict(names))
        elif isinstance(statement, (ast.Assign, ast.AnnAssign)):
            yield "", _lines([statement], names)


def _lines(statements: list[ast.stmt], names: dict[str, Any]) -> list[Edit]:
    """The assignments among these statements, whose values may use the names above them."""
    lines = list[Edit]()
    for statement in statements:
        is_docstring = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        if isinstance(statement, ast.Pass) or is_docstring:
            continue
        if isinstance(statement, ast.AnnAssign) and statement.value is None:
            name = ast.unparse(statement.target)
            annotation = ast.unparse(statement.annotation)
            wrong = say("has no value; write {name} = {value}", name=name, value=annotation)
            lines.append(Edit(name, annotation, CONFIG_FILE, statement.lineno, wrong))
            continue
        targets: list[ast.AST] = [statement]  # The text of another statement names no setting.
        if isinstance(statement, ast.Assign):
            targets = [*statement.targets]
        elif isinstance(statement, ast.AnnAssign):
            targets = [statement.target]
        value, is_plain = _value_of(statement, names)
        problem = "" if is_plain else say("is not a number, a text, True, False or None")
        for target in targets:
            name = ast.unparse(target).partition("\n")[0]
            names[name] = value
            lines.append(Edit(name, value, CONFIG_FILE, statement.lineno, problem))
    return lines


def _value_of(statement: ast.stmt, names: Mapping[str, Any]) -> tuple[Any, bool]:
    """What a statement assigns, and whether a setting can have it; otherwise the source text."""
    expression: Any = getattr(statement, "value", None)
    try:
        # Without builtins and imports, an expression can only calculate with numbers, texts and the names above it.
        value = eval(compile(ast.Expression(expression), CONFIG_FILE, "eval"), {"__builtins__": {}}, dict(names))
    except Exception:
        return ast.unparse(statement).partition("=")[2].strip(), False
    return value, value is None or isinstance(value, (str, int, float))


def _misplaced(name: str, class_name: str, shipped: Mapping[str, Shipped]) -> str:
    """Why a setting cannot act where it stands; empty: it can. `TrainConfig` takes all but the shape of the model."""
    if name not in shipped:
        hint = nearest(name, shipped)
        return say("is no setting{hint}", hint=hint or say("; see --help=all for those that exist"))
    own_class = shipped[name].class_name
    if class_name == own_class or (class_name == TRAIN_CLASS and own_class != MODEL_CLASS):
        return ""
    if not class_name:
        return say("has no effect outside of a class; move it into class {home}", home=own_class)
    return say("has no effect in class {class_name}; move it into class {home}", class_name=class_name, home=own_class)


def _with_bodies(text: str) -> str:
    """The text with `pass` behind the head of each class of comments alone, which Python refuses; line numbers stay."""
    lines = text.splitlines()
    for number, line in enumerate(lines):
        if not re.match(r"class\s+\w+[^#]*:\s*(#.*)?$", line):
            continue
        body = next(
            (other for other in lines[number + 1 :] if other.strip() and not other.lstrip().startswith("#")), ""
        )
        if not body[:1].isspace():
            lines[number] = f"{line.partition('#')[0].rstrip()} pass"
    return "\n".join(lines) + "\n"
