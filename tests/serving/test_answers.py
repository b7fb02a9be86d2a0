"""What an answer says, when it ends, and what is held back before a stop text."""

from __future__ import annotations

from collections.abc import Sequence

from serving.answers import Answer, Update
from settings.declared import GenerateConfig

EOS = 1


def decode(ids: Sequence[int]) -> str:
    return "".join(map(chr, ids))


def updates(text: str, stops: tuple[str, ...] = (), limit: int = 99) -> list[Update]:
    """What an answer sends whose tokens are letters; a line end is the end token."""
    sent: list[Update] = []
    settings = GenerateConfig(max_new_tokens=limit)
    answer = Answer((5, EOS), settings, decode=decode, send=sent.append, stops=stops, is_streamed=True)
    for letter in text:
        if not answer.is_done:
            answer.take(EOS if letter == "\n" else ord(letter), EOS)
    assert answer.is_done == bool(sent and sent[-1].end)
    return sent


def test_an_answer_ends_at_its_end_token_at_its_length_or_at_a_stop_text() -> None:
    assert updates("ab\n") == [Update("a"), Update("b"), Update("", "stop")]
    assert updates("abcdef", limit=3) == [Update("a"), Update("b"), Update("c", "length")]
    assert updates("abcdef", ("cd",)) == [Update("a"), Update("b"), Update("", "stop")]
    assert updates("abcdef", ("cd", "b")) == [Update("a"), Update("", "stop")]
