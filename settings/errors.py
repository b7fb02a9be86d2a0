"""Errors that a user can repair, each with its exit code."""

from __future__ import annotations

from collections.abc import Sequence


class UserError(Exception):
    """What a user can repair: wrong settings or wrong data. Ends the program with exit code 2.

    Args:
        problems: one sentence each, in the form *setting = value, what is wrong, what is allowed, what to do*. What two checks have
            found counts once.
    """

    exit_code = 2

    def __init__(self, *problems: str) -> None:
        self.problems = list(dict.fromkeys(problems))
        super().__init__("\n".join(self.problems))


def refuse(problems: Sequence[str]) -> None:
    """Raise a UserError of all problems, if there are any."""
    if problems:
        raise UserError(*problems)


def reason_of(error: BaseException) -> str:
    """What went wrong, in a line: the system's own word where there is one. Libraries raise an OSError that has none."""
    return getattr(error, "strerror", None) or " ".join(str(error).split())[:200]


class DoesNotFit(UserError):
    """The work cannot be done inside the memory budget. Ends the program with exit code 3."""

    exit_code = 3


class OverBudget(UserError):
    """The work is done and saved, and took more than the memory budget on the way. Ends the program with exit code 3."""

    exit_code = 3
