"""Errors that a user can repair, each with its exit code."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from support.language import Message, join, say


class UserError(Exception):
    """What a user can repair: wrong settings or wrong data. Ends the program with exit code 2.

    Args:
        problems: one sentence each, in the form *setting = value, what is wrong, what is allowed, what to do*. What two
            checks have found counts once.
        values: of the only problem, as `say` takes them: `UserError("{path} has no column {name}", path=path,
            name=name)`.
    """

    exit_code = 2

    def __init__(self, *problems: str, **values: Any) -> None:
        assert not values or len(problems) == 1, "values belong to one problem"
        messages = [problem if isinstance(problem, Message) else say(problem, **values) for problem in problems]
        self.problems: list[str] = list(dict.fromkeys(messages))
        super().__init__(*self.problems)

    def __str__(self) -> str:
        return str(join("\n", self.problems))


@contextmanager
def collected(problems: list[str]) -> Iterator[None]:
    """A context whose UserError is added to others, to be raised with them."""
    try:
        yield
    except UserError as error:
        problems += error.problems


def refuse(problems: Sequence[str]) -> None:
    """Raise a UserError of all problems, if there are any."""
    if problems:
        raise UserError(*problems)


def reason_of(error: BaseException) -> str:
    """What went wrong, in a line: our own message, or the system's own word where there is one.

    Libraries raise an OSError that has none.
    """
    if error.args and isinstance(error.args[0], Message):
        return join("; ", error.args)
    return getattr(error, "strerror", None) or " ".join(str(error).split())[:200]


class DoesNotFit(UserError):
    """The work cannot be done inside the memory budget. Ends the program with exit code 3."""

    exit_code = 3


class OverBudget(UserError):
    """The work is done and saved, and took more than the memory budget on the way. Ends the program with exit code
    3.
    """

    exit_code = 3
