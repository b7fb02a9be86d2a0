"""Text shown while its tokens are generated, never with a part of a letter.

Only the tokens since the last piece are decoded, after the piece before, as a word's first token may stand for a space
that a text does not begin with. All pieces together are the decoded text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from data.tokenizers.tokenizer import Tokenizer

BROKEN = "\N{REPLACEMENT CHARACTER}"  # A tokenizer shows this for a letter whose bytes are not all there yet.
LONGEST_LETTER = 4  # A letter has so many bytes at most, and so as many tokens.


class Pieces:
    """The text of tokens that come one by one.

    Args:
        decode: turns token ids into text.
    Memory: the tokens.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._tokens: list[int] = []
        self._begin = 0  # The first token of the window that is decoded.
        self._end_shown = 0  # The token behind the last one whose text was given.
        self._whole_letters = 0  # The most whole letters that the window has had.
        self._stuck = 0  # Tokens since there were more of them.

    def push(self, token: int) -> str:
        """What the next token adds to the text; empty where a letter is not whole yet."""
        self._tokens.append(token)
        before = len(self._shown())
        text = self._decode(self._tokens[self._begin :])
        whole_letters = len(text.rstrip(BROKEN))  # A token may end one letter and begin the next.
        self._stuck += 1
        if whole_letters > self._whole_letters:
            self._whole_letters = whole_letters
            self._stuck = 0
        is_broken = text.endswith(BROKEN) and self._stuck <= LONGEST_LETTER
        if is_broken or len(text) <= before:
            return ""
        self._begin = self._end_shown
        self._end_shown = len(self._tokens)
        self._whole_letters = 0
        self._stuck = 0
        return text[before:]

    def rest(self) -> str:
        """What is left when no more tokens come."""
        return self._decode(self._tokens[self._begin :])[len(self._shown()) :]

    def _shown(self) -> str:
        return self._decode(self._tokens[self._begin : self._end_shown])


def pieces(tokenizer: Tokenizer, tokens: Iterator[int]) -> Iterator[str]:
    """Text as its tokens come; see `Pieces`. No piece is empty."""
    window = Pieces(tokenizer.decode_answer)
    yield from filter(None, map(window.push, tokens))
    yield from filter(None, [window.rest()])
