"""Labels of texts: what a model with a head over labels says of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, cast

from commands.text_reader import TextReader
from data.prepare.encode import TextEncoder
from engine.step import to_micro_batch
from memory.answers import AnswerBatch
from settings.declared import DataConfig
from settings.fields import AUTO
from settings.tasks import task_for
from tasks.label_outputs import EncodedText, LabelAnswer, LabelOutputs
from training.loaded_model import LoadedModel

LEAST_TEXT = AnswerBatch(1, 512, 1)  # That the memory has to hold at least.


@dataclass
class Labeller(TextReader):
    """Labels of texts."""

    rows_flag: ClassVar[str] = "generate_batch_size"
    task: LabelOutputs = field(init=False)

    def __post_init__(self) -> None:
        self.task = cast(LabelOutputs, task_for(AUTO, self.trained.held_model.shape.head))

    @classmethod
    def of(cls, trained: LoadedModel, data: DataConfig, rows: int | str) -> Labeller:
        """Reads texts as the settings say.

        Args:
            rows: the setting `generate_batch_size`.
        """
        encoder = TextEncoder(trained.tokenizer, data.prepare_text)
        return cls(trained, encoder, data.max_seq_len, rows=None if rows == AUTO else int(rows))

    def __call__(self, texts: Sequence[str]) -> list[LabelAnswer]:
        """What the model says of texts, in their order.

        Raises:
            DoesNotFit: the budget does not hold a text.
        """
        return self.answers([self.encode(text) for text in texts])

    @property
    def column(self) -> str:
        """The first column of an answer."""
        return self.task.column(self.trained.held_model.shape.label_names)

    def encode(self, text: str, words: int | None = None) -> EncodedText:
        """Token ids of a text, and where its words or letters are.

        Args:
            words: how many words the text was joined of; None: it is a text.
        """
        return self.task.encode(text, self.encoder, self.longest, words)

    def answers(self, texts: Sequence[EncodedText]) -> list[LabelAnswer]:
        """What the model says of encoded texts; raises as a call."""

        def label(numbers: list[int]) -> Iterator[LabelAnswer]:
            return self._label([texts[number] for number in numbers])

        return self.in_batches([len(text.ids) for text in texts], label)

    def _label(self, texts: Sequence[EncodedText]) -> Iterator[LabelAnswer]:
        blockwise = self.trained.blockwise
        shape = blockwise.model.config
        batch = self.task.unlabelled_batch(texts, shape)
        (logits,) = blockwise.predict([to_micro_batch(batch, shape, self.trained.device.torch_device)])
        outputs = logits.float().cpu().numpy()
        begin = 0
        for text in texts:
            end = begin + self.task.labels_of(len(text.ids))
            yield self.task.answer(text, outputs[begin:end], shape.label_names)
            begin = end

    def _target_tokens(self, longest: int) -> int:
        return longest * (self.trained.held_model.shape.num_decoder_layers > 0)
