"""What an answer says, when it ends, and what is held back before a stop text."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from serving.answers import Answer, StopTexts, Update
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


@given(st.lists(st.text("abc", max_size=5)), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3))
def test_stop_texts_give_the_text_before_the_first_stop_text(parts: list[str], stops: list[str]) -> None:
    until = StopTexts(stops)
    value = ""
    for part in parts:
        value += until.push(part)
        if until.is_reached:
            break
    whole = "".join(parts)
    ends = [whole.find(stop) + len(stop) for stop in stops if stop in whole]
    if not ends:
        assert not until.is_reached and value + until.rest() == whole
    else:
        assert until.is_reached and whole.startswith(value)
        assert not any(stop in value for stop in stops)
        assert any(whole[len(value) :].startswith(stop) for stop in stops)
