"""One answer of the API while it waits and is written: its prompt, how its tokens are chosen, and its text so far.

A stop text ends an answer before itself. So text is held back as long as it could be the beginning of one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from data.tokenizers.pieces import Pieces
from model.decoding.generation import is_cut
from model.decoding.sampling import AnswerRow

# Why an answer ends, in OpenAI's words:
STOP = "stop"
LENGTH = "length"


class Refused(Exception):
    """What is asked for cannot be done, or an answer could not be written.

    Args:
        status: of HTTP. text: what is wrong, for people. param: the field. code: for programs.
    """

    def __init__(self, status: int, text: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(text)
        self.status = status
        self.text = text
        self.param = param
        self.code = code


@dataclass(frozen=True)
class Update:
    """What has become of an answer since the last one.

    Args:
        text: that was added. end: why it has ended; empty while it goes on. problem: what went wrong.
    """

    text: str = ""
    end: str = ""
    problem: str = ""


@dataclass(eq=False, kw_only=True)
class Answer(AnswerRow):
    """One answer; the engine's thread alone changes it, but for `is_abandoned`.

    Args:
        decode: turns token ids into text. send: takes what is new, in the engine's thread.
        stops: texts that end it, none of them empty. is_streamed: whether text is wanted before the end.
        is_abandoned: nobody waits for it any more.
    """

    decode: Callable[[Sequence[int]], str]
    send: Callable[[Update], None]
    stops: tuple[str, ...] = ()
    is_streamed: bool = False
    is_abandoned: bool = False
    is_done: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._pieces = Pieces(self.decode)
        self._stop_texts = StopTexts(self.stops)
        self._unsent = ""

    def take(self, token: int, eos: int) -> None:
        """Go on with the token that was chosen, or end."""
        text = ""
        end = STOP
        if token != eos:
            self.tokens.append(token)
            text = self._pieces.push(token)
            end = LENGTH if is_cut(self.tokens, self.settings) else ""
        if end:
            text += self._pieces.rest()
        self._unsent += self._stop_texts.push(text)
        if self._stop_texts.is_reached:
            end = STOP
        if end:
            self._unsent += self._stop_texts.rest()
            self.finish(end)
        elif self._unsent and self.is_streamed:
            self.send(Update(self._unsent))
            self._unsent = ""

    def finish(self, end: str = "", problem: str = "") -> None:
        """End it, however, and send the last of it."""
        if not self.is_done:
            self.is_done = True
            self.send(Update(self._unsent, end, problem))


class StopTexts:
    """Text up to the first of some stop texts."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._withheld = ""
        self.is_reached = False

    def push(self, text: str) -> str:
        """What of the text so far is certain to stand before any stop text, and is new."""
        self._withheld += text
        begins = [self._withheld.find(stop) for stop in self._stops if stop in self._withheld]
        if begins:
            self.is_reached = True
            return self.rest()[: min(begins)]
        certain = len(self._withheld) - max((_overlap(self._withheld, stop) for stop in self._stops), default=0)
        new = self._withheld[:certain]
        self._withheld = self._withheld[certain:]
        return new

    def rest(self) -> str:
        """What was held back, when no more text comes."""
        text = self._withheld
        self._withheld = ""
        return text


def _overlap(text: str, stop: str) -> int:
    """Letters at the end of a text with which a stop text could begin."""
    return next((count for count in range(len(stop) - 1, 0, -1) if text.endswith(stop[:count])), 0)
