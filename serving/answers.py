"""One answer of the API while it waits and is written: its prompt, how its tokens are chosen, and its text so far.

A stop text ends an answer before itself. So text is held back as long as it could be the beginning of one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from data.tokenizers.pieces import Pieces
from model.decoding.generation import is_cut
from model.decoding.sampling import AnswerRow

STOP, LENGTH = "stop", "length"  # why an answer ends, in OpenAI's words


class Refused(Exception):
    """What is asked for cannot be done, or an answer could not be written.

    Args:
        status: of HTTP. text: what is wrong, for people. param: the field. code: for programs.
    """

    def __init__(self, status: int, text: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(text)
        self.status, self.text, self.param, self.code = status, text, param, code


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
    """One answer; the engine's thread alone changes it, but for `is_left`.

    Args:
        decode: turns token ids into text. send: takes what is new, in the engine's thread.
        stops: texts that end it, none of them empty. is_streamed: whether text is wanted before the end.
        is_left: nobody waits for it any more.
    """

    decode: Callable[[Sequence[int]], str]
    send: Callable[[Update], None]
    stops: tuple[str, ...] = ()
    is_streamed: bool = False
    is_left: bool = False
    is_done: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._pieces, self._stop_texts, self._held = Pieces(self.decode), StopTexts(self.stops), ""

    def take(self, token: int, eos: int) -> None:
        """Go on with the token that was chosen, or end."""
        end, text = STOP, ""
        if token != eos:
            self.tokens.append(token)
            end, text = LENGTH if is_cut(self.tokens, self.settings) else "", self._pieces.push(token)
        self._held += self._stop_texts.push(text + (self._pieces.rest() if end else ""))
        if self._stop_texts.is_reached:
            end = STOP
        if end:
            self._held += self._stop_texts.rest()
            self.finish(end)
        elif self._held and self.is_streamed:
            self.send(Update(self._held))
            self._held = ""

    def finish(self, end: str = "", problem: str = "") -> None:
        """End it, however, and send the last of it."""
        if not self.is_done:
            self.is_done = True
            self.send(Update(self._held, end, problem))


class StopTexts:
    """Text up to the first of some stop texts."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops, self._kept = tuple(stops), ""
        self.is_reached = False

    def push(self, text: str) -> str:
        """What of the text so far is certain to stand before any stop text, and is new."""
        self._kept += text
        places = [place for stop in self._stops if (place := self._kept.find(stop)) >= 0]
        if places:
            self.is_reached = True
            return self.rest()[: min(places)]
        certain = len(self._kept) - max((_overlap(self._kept, stop) for stop in self._stops), default=0)
        given, self._kept = self._kept[:certain], self._kept[certain:]
        return given

    def rest(self) -> str:
        """What was held back, when no more text comes."""
        given, self._kept = self._kept, ""
        return given


def _overlap(text: str, stop: str) -> int:
    """Letters at the end of a text with which a stop text could begin."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
