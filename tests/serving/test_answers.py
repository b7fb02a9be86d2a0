"""What an answer says, when it ends, and what is held back before a stop text."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from model.decoding.choosing import Choice, Penalties
from serving.answers import Answer, Prompt, Told, Until

EOS = 1


def decode(ids: Sequence[int]) -> str:
    return "".join(map(chr, ids))


def told(text: str, stops: tuple[str, ...] = (), limit: int = 99, is_streamed: bool = True) -> list[Told]:
    """What an answer tells whose tokens are letters; a line end is the end token."""
    heard: list[Told] = []
    answer = Answer(Prompt((5, EOS)), limit, Choice(), Penalties(), stops, decode, heard.append, is_streamed)
    for letter in text:
        if not answer.is_done:
            answer.take(EOS if letter == "\n" else ord(letter), EOS)
    assert answer.is_done == bool(heard and heard[-1].end)
    return heard


def test_an_answer_ends_at_its_end_token_at_its_length_or_at_a_stop_text() -> None:
    assert told("ab\n") == [Told("a"), Told("b"), Told("", "stop")]
    assert told("abcdef", limit=3) == [Told("a"), Told("b"), Told("c", "length")]
    assert told("abcdef", ("cd",)) == [Told("a"), Told("b"), Told("", "stop")]
    assert told("abcdef", ("cd", "b")) == [Told("a"), Told("", "stop")]


@given(st.lists(st.text("abc", max_size=5)), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3))
def test_until_gives_the_text_before_the_first_stop_text(parts: list[str], stops: list[str]) -> None:
    until, given = Until(stops), ""
    for part in parts:
        given += until.push(part)
        if until.is_reached:
            break
    whole = "".join(parts)
    ends = [whole.find(stop) + len(stop) for stop in stops if stop in whole]
    if not ends:
        assert not until.is_reached and given + until.rest() == whole
    else:
        assert until.is_reached and whole.startswith(given)
        assert not any(stop in given for stop in stops)
        assert any(whole[len(given) :].startswith(stop) for stop in stops)
