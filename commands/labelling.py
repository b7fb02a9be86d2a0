"""Labels of texts: what a model with a head over labels says of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, cast

from commands.text_reader import TextReader, text_settings
from data.prepare.encode import TextEncoder
from engine.step import to_micro_batch
from language import say
from memory.answers import AnswerBatch
from settings.declared import Config
from settings.errors import refuse
from settings.fields import AUTO
from settings.tasks import task_for
from tasks.label_outputs import EncodedText, LabelAnswer, LabelOutputs
from training.loaded_model import LoadedModel
from training.saved_model import SavedModel

SETTINGS_OF_PROMPTS = ("num_answers", "prompt_template", "source_prefix")
LEAST_TEXT = AnswerBatch(1, 512, 1)  # That the memory has to hold at least.


def labelling_settings(config: Config, model: SavedModel) -> Config:
    """Config for texts as the model was trained on them.

    Raises:
        UserError: settings are named that are for models that write text.
    """
    values = config.as_dict()
    defaults = Config().as_dict()
    problems = [
        say(
            "--{name} = {value}, is for models that write text, and this one gives labels; omit it",
            name=name,
            value=values[name],
        )
        for name in (*vars(config.generate), *SETTINGS_OF_PROMPTS)
        # A file may be what a run has saved, which names all settings; a line edited in `config.py` is for all models.
        if config.typed(name) and values[name] != defaults[name]
    ]
    refuse(problems)
    return config.with_saved(text_settings(model, "text_column"))


@dataclass
class Labeller(TextReader):
    """Labels of texts."""

    rows_flag: ClassVar[str] = "generate_batch_size"
    task: LabelOutputs = field(init=False)

    def __post_init__(self) -> None:
        self.task = cast(LabelOutputs, task_for(AUTO, self.trained.held.shape.head))

    @classmethod
    def of(cls, trained: LoadedModel, config: Config) -> Labeller:
        """By the settings."""
        requested = config.answer.generate_batch_size
        return cls(
            trained,
            TextEncoder(trained.tokenizer, config.data.prepare_text),
            config.data.max_seq_len,
            rows=None if requested == AUTO else int(requested),
        )

    def __call__(self, texts: Sequence[str]) -> list[LabelAnswer]:
        """What the model says of texts, in their order.

        Raises:
            DoesNotFit: the budget does not hold a text.
        """
        return self.answers([self.encode(text) for text in texts])

    @property
    def column(self) -> str:
        """The first column of an answer."""
        return self.task.column(self.trained.held.shape.label_names)

    def encode(self, text: str) -> EncodedText:
        """Token ids of a text, and where its words or letters are."""
        return self.task.encode(text, self.encoder, self.longest)

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
        return longest * (self.trained.held.shape.num_decoder_layers > 0)
