"""Names allowed for runs, one rule for the terminal and the page.

A name becomes a folder, and the middle of longer names: those of its lock, its log and what is made beside it. File
systems take 255 bytes of each; a letter takes up to four.
"""

from __future__ import annotations

import re

from support.language import Message, say

LONGEST_NAME = 120
LONGEST_NAME_BYTES = 200
SHOWN_NAME = 80  # A message shows so many letters of a name.
_NAME = re.compile(r"[^\W.][\w.+=@ -]*")


def name_problem(name: str) -> Message | None:
    """Why a new run cannot be called so, as behind a name and a comma; None: it can."""
    if not _NAME.fullmatch(name) or name != name.strip() or name.endswith("."):
        return say("is not a valid folder name; use letters, digits, _ and -")
    size = len(name.encode("utf8"))
    if len(name) <= LONGEST_NAME and size <= LONGEST_NAME_BYTES:
        return None
    return say(
        "has {letters} characters, {size} bytes in UTF-8; allowed: {most} characters and {most_bytes} bytes; "
        "choose a shorter name",
        letters=len(name),
        size=size,
        most=LONGEST_NAME,
        most_bytes=LONGEST_NAME_BYTES,
    )


def shown_name(name: str) -> str:
    """A name as a message shows it, cut where it is long."""
    return name if len(name) <= SHOWN_NAME else f"{name[:SHOWN_NAME]}..."
