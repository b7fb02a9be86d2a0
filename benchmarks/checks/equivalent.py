"""Which changes can no test notice, since they change nothing that is promised? With the reason; looked at one by one."""

from __future__ import annotations

# (file, before, after): why
SAME: dict[tuple[str, str, str], str] = {}


def reason_of(file: str, before: str, after: str) -> str:
    """Why a change that survived is none; empty where it is one."""
    return SAME.get((file, before, after), "")
