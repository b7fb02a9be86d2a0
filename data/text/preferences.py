"""Can a pair of answers teach anything? Only if both say something, and not the same."""

from __future__ import annotations

from collections.abc import Sequence

from data.text.clean import Dropped
from settings.fields import UserError, counted

EQUAL, EMPTY = "equal answers", "empty answer"
_NAMED = 60  # characters of a prompt that names a row


def answers_fault(texts: Sequence[str]) -> str | None:
    """Say why a row of prompt, chosen and rejected cannot be learnt; None: it can, or it is another kind of row."""
    if len(texts) != 3:
        return None
    _, chosen, rejected = (text.strip() for text in texts)
    if not chosen or not rejected:
        return EMPTY
    return EQUAL if chosen == rejected else None


def check_answers(dropped: Dropped, sources: str) -> None:
    """Refuse data with such rows, counting and naming them.

    Args:
        dropped: what was left out of these sources.
    Raises:
        UserError: there are any.
    """
    words = {
        EQUAL: "with equal answers, chosen and rejected, from which nothing can be learnt",
        EMPTY: "with an empty chosen or rejected answer",
    }
    problems = []
    for fault, what in words.items():
        if entry := dropped.reasons.get(fault):
            named = ", ".join(dict.fromkeys(repr(text.partition(" | ")[0][:_NAMED]) for text in entry["samples"]))
            problems.append(
                f"--train_file: {sources}: {counted(entry['count'], 'row')} {what}, such as at the prompt {named}; "
                "repair the data, or use --skip_bad_rows=True to leave such rows out"
            )
    if problems:
        raise UserError(*problems)
