"""Which changes can no test notice, since they change nothing that is promised? With the reason; looked at one by one."""

from __future__ import annotations

# (file, first line of the statement, before, after): why
SAME: dict[tuple[str, str, str, str], str] = {}


def reason_of(file: str, statement: str, before: str, after: str) -> str:
    """Why a change that survived is none; empty where it is one."""
    return SAME.get((file, statement, before, after), "")
