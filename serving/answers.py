"""What is one answer while it waits and is written? Its prompt, how its tokens are chosen, and its text so far.

A stop text ends an answer before itself. So text is held back as long as it could be the beginning of one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from data.tokenizers.pieces import Pieces
from model.decoding.choosing import Choice, Penalties
from model.decoding.running import RunningRow

STOP, LENGTH = "stop", "length"  # why an answer ends, in OpenAI's words


class Refused(Exception):
    """What is asked for cannot be done, or an answer could not be written.

    Args:
        status: of HTTP. text: what is wrong, for people. param: the field. code: for programs.
    """

    def __init__(self, status: int, text: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(text)
        self.status, self.text, self.param, self.code = status, text, param, code


@dataclass
class Prompt:
    """The tokens that answers are written to, and what the model made of them.

    Args:
        ids: with the end token. answers: how many are still to be written, which share `source`.
    """

    ids: tuple[int, ...]
    answers: int = 1
    source: Tensor | None = None

    def leave(self) -> None:
        """One answer less; with the last one the memory is free."""
        self.answers -= 1
        if self.answers <= 0:
            self.source = None


@dataclass(frozen=True)
class Told:
    """What has become of an answer since it was told last.

    Args:
        text: that was added. end: why it has ended; empty while it goes on. problem: what went wrong.
    """

    text: str = ""
    end: str = ""
    problem: str = ""


@dataclass
class Answer:
    """One answer; the engine's thread alone changes it, but for `is_left`.

    Args:
        limit: most tokens. choice: with the seed of this answer. stops: texts that end it, none of them empty.
        decode: turns token ids into text. tell: takes what is new, in the engine's thread.
        is_streamed: whether text is wanted before the end.
    """

    prompt: Prompt
    limit: int
    choice: Choice
    penalties: Penalties
    stops: tuple[str, ...]
    decode: Callable[[Sequence[int]], str]
    tell: Callable[[Told], None]
    is_streamed: bool = False
    is_left: bool = False  # nobody waits for it any more
    row: RunningRow | None = None
    tokens: list[int] = field(default_factory=list)
    is_done: bool = False
    _held: str = field(default="", init=False)  # text that nobody asked for before the end

    def __post_init__(self) -> None:
        self.generator: torch.Generator = self.choice.generator(self.prompt.ids)
        self._pieces = Pieces(self.decode) if self.is_streamed or self.stops else None
        self._until = Until(self.stops)

    @property
    def needed_tokens(self) -> int:
        """Tokens whose keys and values it may need."""
        return len(self.prompt.ids) + self.limit

    def take(self, token: int, eos: int) -> None:
        """Go on with the token that was chosen, or end."""
        if token == eos:
            self._finish(STOP)
            return
        self.tokens.append(token)
        text = self._until.push(self._pieces.push(token)) if self._pieces is not None else ""
        if self._until.is_reached:
            self.finish(Told(text, STOP))
        elif len(self.tokens) >= self.limit:
            self._finish(LENGTH, text)
        elif text and self.is_streamed:
            self.tell(Told(text))
        else:
            self._held += text

    def _finish(self, why: str, text: str = "") -> None:
        if self._pieces is None:
            text = self.decode(self.tokens)
        else:
            text += self._until.push(self._pieces.rest())
            why = STOP if self._until.is_reached else why
            text += "" if self._until.is_reached else self._until.rest()
        self.finish(Told(text, why))

    def finish(self, told: Told) -> None:
        """End it, however: its memory is free, and the last thing is told."""
        if self.is_done:
            return
        self.is_done, self.row = True, None
        self.prompt.leave()
        self.tell(Told(self._held + told.text, told.end, told.problem))


class Until:
    """Text up to the first of some stop texts."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops, self._kept = tuple(stops), ""
        self.is_reached = False

    def push(self, text: str) -> str:
        """What of the text so far is certain to stand before any stop text, and is new."""
        if not self._stops:
            return text
        self._kept += text
        found = [place for stop in self._stops if (place := self._kept.find(stop)) >= 0]
        if found:
            self.is_reached = True
            return self.rest()[: min(found)]
        open_letters = max(_overlap(self._kept, stop) for stop in self._stops)
        certain = len(self._kept) - open_letters
        given, self._kept = self._kept[:certain], self._kept[certain:]
        return given

    def rest(self) -> str:
        """What was held back, when no more text comes."""
        given, self._kept = self._kept, ""
        return given


def _overlap(text: str, stop: str) -> int:
    """Letters at the end of a text with which a stop text could begin."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
