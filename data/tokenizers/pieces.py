"""Text shown while its tokens are generated, never with a part of a letter.

Only the tokens since the last piece are decoded, after the piece before, as a word's first token may stand for a space that
a text does not begin with. All pieces together are the decoded text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from data.tokenizers.tokenizer import Tokenizer

BROKEN = "\N{REPLACEMENT CHARACTER}"  # what a tokenizer shows for a letter whose bytes are not all there yet
LONGEST_LETTER = 4  # bytes, so as many tokens at most


class Pieces:
    """The text of tokens that come one by one.

    Args:
        decode: turns token ids into text.
    Memory: the tokens.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._written: list[int] = []
        self._before = self._shown = 0  # tokens after which the window begins, and those whose text was given
        self._whole = self._stuck = 0  # letters of the window that are whole, and tokens since there were more of them

    def push(self, token: int) -> str:
        """What the next token adds to the text; empty where a letter is not whole yet."""
        self._written.append(token)
        known, text = self._known(), self._decode(self._written[self._before :])
        now = len(text.rstrip(BROKEN))  # a token may end one letter and begin the next
        self._whole, self._stuck = max(self._whole, now), 0 if now > self._whole else self._stuck + 1
        is_whole = not text.endswith(BROKEN) or self._stuck > LONGEST_LETTER
        if len(text) <= len(known) or not is_whole:
            return ""
        self._before, self._shown, self._whole, self._stuck = self._shown, len(self._written), 0, 0
        return text[len(known) :]

    def rest(self) -> str:
        """What is left when no more tokens come."""
        return self._decode(self._written[self._before :])[len(self._known()) :]

    def _known(self) -> str:
        return self._decode(self._written[self._before : self._shown])


def pieces(tokenizer: Tokenizer, tokens: Iterator[int]) -> Iterator[str]:
    """Text as its tokens come; see `Pieces`."""
    made = Pieces(tokenizer.decode_answer)
    for token in tokens:
        if piece := made.push(token):
            yield piece
    if rest := made.rest():
        yield rest
