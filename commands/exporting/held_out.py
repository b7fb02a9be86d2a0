"""Answers of ONNX files to the rows that the model's run held out: what less precision costs in the task itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from commands.evaluate import evaluation_rows
from commands.exporting.onnx_files import LIBRARY_BYTES, graph_bytes, session_bytes
from commands.exporting.onnx_run import CachedDecoder, padded, session
from data.batches.loader import StepLoader
from data.tokenizers.tokenizer import Tokenizer
from settings.declared import Config, GenerateConfig, T5ModelConfig
from settings.errors import DoesNotFit, UserError
from settings.fields import AUTO
from settings.tasks import MODEL_HEADS, task_named
from support.language import join, say
from training.evaluation.samples import generate_metrics
from training.processes.group import Group
from training.report.progress import Progress
from training.saved_model import SavedModel

SCORE = "identical"
MOST_ROWS = 8  # Rows that are answered at once; fewer where they are long.
MOST_TOKENS = 1024  # Tokens of the sources that are read at once.


@dataclass(frozen=True)
class HeldOut:
    """Rows with right answers.

    Args:
        loader: of the rows. tokenizer: of the model. rows: how many are answered, from the first.
        new_tokens: of the longest right answer; a longer one is wrong anyway.
    """

    loader: StepLoader
    tokenizer: Tokenizer
    rows: int
    new_tokens: int

    @property
    def rows_at_once(self) -> int:
        """Rows that are answered together."""
        return max(1, min(MOST_ROWS, MOST_TOKENS // self.loader.longest[0]))

    def bytes_beside(self, shape: T5ModelConfig, precision: str) -> int:
        """Bytes that onnxruntime holds at the highest while rows are answered, both graphs among them.

        Args:
            precision: of the copy that answers too.
        """
        source = self.loader.longest[0]
        target = self.new_tokens + 1
        scores = 2 * shape.num_heads * source * source
        inner = source * (4 * shape.d_model + 3 * shape.d_ff + 3 * shape.num_heads * shape.d_kv)
        keys_and_values = 4 * shape.num_decoder_layers * shape.num_heads * shape.d_kv * (source + target)
        answering = 4 * self.rows_at_once * (scores + inner + keys_and_values + 2 * shape.vocab_size)
        graphs = sum(session_bytes(size, precision) for size in graph_bytes(shape))
        return LIBRARY_BYTES + graphs + answering

    def identical(self, encoder: Path, decoder: Path, shape: T5ModelConfig) -> float:
        """The share of rows whose greedy answer is the right one letter by letter, in percent.

        Args:
            encoder, decoder: the graphs. shape: of the model.
        """
        encode = session(encoder)
        decode = session(decoder)

        def answer(prompts: Sequence[Sequence[int]]) -> list[list[list[int]]]:
            inputs = padded(prompts)
            (states,) = encode.run(None, inputs)
            decoding = CachedDecoder(decode, shape, states, inputs["attention_mask"])
            return [[ids] for ids in decoding.answers(shape, self.new_tokens)]

        scores, _, _ = generate_metrics(
            answer,
            self.loader,
            self.tokenizer,
            GenerateConfig(max_new_tokens=self.new_tokens),
            Group(),
            rows=self.rows,
            batch_size=self.rows_at_once,
            names=[SCORE],
        )
        return scores[SCORE]


def held_out(config: Config, model: SavedModel) -> HeldOut | None:
    """The rows of `--validation_file`, or of the one that the model's run was measured on, if it can still be read.

    Returns:
        None where there are none, the model writes no text, or nothing shall be answered.
    Raises:
        UserError: the rows of `--validation_file` are not usable. DoesNotFit: the budget does not hold the child that
            prepares rows.
    """
    most = config.metrics.eval_generate_rows
    if most == 0 or not MODEL_HEADS[model.shape.head].writes_text:
        return None
    is_named = config.is_set("validation_file")
    if not is_named and model.run_settings.get("validation_file") is None:
        return None
    try:
        _, prepared, loader = evaluation_rows(config, model)
    except UserError as error:
        if is_named or isinstance(error, DoesNotFit):
            raise
        text = "the validation file of the model's run is not usable any more, so no rows are answered: {problem}"
        Progress(1).note(say(text, problem=join("; ", error.problems)))
        return None
    rows = min(loader.num_rows, task_named(prepared.objective).answered_rows if most == AUTO else int(most))
    if rows == 0:
        return None
    return HeldOut(loader, Tokenizer.load(model.tokenizer), rows, loader.longest_answer)
