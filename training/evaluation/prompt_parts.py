"""Long prompts answered in parts, for models that lose their way in texts longer than most of what they learnt from."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise

import numpy as np

from data.text.templates import USER, Template
from data.tokenizers.tokenizer import RARE_LETTER, Tokenizer
from model.decoding.generation import is_cut
from settings.declared import GenerateConfig

# Prompts are cut where a sentence ends, else at a blank; and how near this must be to where the parts would be equal,
# as a share of a part.
CUTS = ((re.compile(r"[.!?;:]+\s+|[。！？；]\s*"), 0.25), (re.compile(r"\s+"), 0.5))


def was_cut(answer: Sequence[int], settings: GenerateConfig, eos_id: int) -> bool:
    """Whether an answer, or a part of it, was ended by the longest length."""
    return answer[-1:] != [eos_id] if settings.split_prompts else is_cut(answer, settings)


@dataclass(frozen=True)
class PromptParts:
    """Cuts prompts that `template` has worded and `tokenizer` encoded, and joins the answers to their parts."""

    tokenizer: Tokenizer
    template: Template
    settings: GenerateConfig

    @classmethod
    def asked(cls, tokenizer: Tokenizer, template: Template, settings: GenerateConfig) -> PromptParts | None:
        """Those that the settings ask for; None where prompts are answered whole."""
        return cls(tokenizer, template, settings) if settings.split_prompts else None

    def answer_in_parts(
        self, inputs: Sequence[list[int]], write: Callable[[list[list[int]]], list[list[int]]]
    ) -> list[list[int]]:
        """Token ids of one answer to each prompt; with end of text, unless one of its parts was cut by the longest
        length.
        """
        parts = list(map(self.split, inputs))
        written = iter(write([part for several in parts for part in several]))
        return [self._joined(list(islice(written, len(several)))) for several in parts]

    def split(self, ids: list[int]) -> list[list[int]]:
        """The prompt in parts of about equal length, each worded as it was; whole if it is no longer than
        `split_prompts`, or holds several turns.
        """
        count = -(-(len(ids) - 1) // self.settings.split_prompts)
        if count < 2:
            return [ids]
        text = self.tokenizer.decode_with_unknown(ids)
        if self.tokenizer.unk_id in ids:
            text = text.replace(self.tokenizer.names["unk_token"], RARE_LETTER)
        question = self.template.question(text)
        if self.template.prompt([(USER, question)]).strip() != text.strip():
            return [ids]
        _, ends = self.tokenizer.encode_with_ends(question)
        cuts = _cuts(question, [int(ends[len(ends) * number // count - 1]) for number in range(1, count)])
        texts = (question[begin:end].strip() for begin, end in pairwise(sorted({0, *cuts, len(question)})))
        worded = [self.template.prompt([(USER, part)]) for part in texts if part]
        encoded = self.tokenizer.encode_prompts(worded, is_chat=bool(self.template.jinja))
        return [[*ids.tolist(), self.tokenizer.eos_id] for ids in encoded]

    def _joined(self, answers: list[list[int]]) -> list[int]:
        ends = [] if any(is_cut(answer, self.settings) for answer in answers) else [self.tokenizer.eos_id]
        if len(answers) == 1:
            return [*answers[0], *ends]
        texts = (self.tokenizer.decode_answer(answer).strip() for answer in answers)
        (ids,) = self.tokenizer.encode_batch([" ".join(filter(None, texts))], special=True)
        return [*ids.tolist(), *ends]


def _cuts(text: str, equal_cuts: Sequence[int]) -> list[int]:
    """The characters before which a text is cut: near those of equal parts at a sentence's end, else at a blank, else
    there.
    """
    part = len(text) / (len(equal_cuts) + 1)
    ends_of_pattern = [(np.array([match.end() for match in pattern.finditer(text)]), near) for pattern, near in CUTS]
    cuts = list(equal_cuts)
    for number, cut in enumerate(equal_cuts):
        for ends, near in reversed(ends_of_pattern):
            distances = np.abs(ends - cut)
            if len(ends) and distances.min() <= near * part:
                cuts[number] = int(ends[distances.argmin()])
    return cuts
