"""What `plan` and `prepare` show of rows; `plan` asks each in one look of the child that reads files."""

from __future__ import annotations

from pathlib import Path

from data.batches.loader import StepLoader
from data.batches.rows import lengths_of
from data.prepare.estimate import estimate_lengths
from data.prepare.preparing import Prepared, find_prepared
from data.prepare.preview import table_of_files, table_of_shards
from data.prepare.training_data import find_training_data
from data.sources.peek import about_rows, about_tokens
from data.task import Table
from data.tokenizers.tokenizer import Tokenizer
from settings.declared import Config
from settings.fields import AUTO
from support.storage import only_if_made

SHOWN_ROWS = 2


def count_tokens(config: Config) -> int:
    """Tokens that the rows' tokenizer has or will have; 0 where nothing says it yet.

    Raises:
        UserError: the rows cannot be used. NotMade: the built-in sample is not there.
    """
    prepared = find_prepared(config)
    if prepared is not None:
        return Tokenizer.load(prepared.tokenizer_dir).size
    sample = estimate_lengths(config.data, config.train.is_finetune, config.model, config.tokenizer, config.cleaning)
    return 0 if sample is None else sample.vocabulary


def count_and_show(config: Config) -> tuple[int, Table]:
    """About how many rows an epoch will have, 0 where they are prepared and so counted; and the first rows as the model
    receives them, for which nothing is trained or prepared.

    Raises:
        UserError: the rows cannot be used.
    """
    data = config.data
    prepared = find_prepared(config)
    if prepared is not None:
        return 0, examples_of(prepared, config, SHOWN_ROWS)
    rows = find_training_data(data, config.train.is_finetune, only_if_made)
    if rows.task.is_windowed:
        count = about_tokens(rows.sources) // lengths_of(data, rows.objective).raw_tokens
    else:
        count = about_rows(rows.sources)
    has_tokenizer = data.tokenizer_dir != AUTO and data.extra_tokens is None
    folder = Path(data.tokenizer_dir) if has_tokenizer else None
    examples = table_of_files(data, rows, config.cleaning, SHOWN_ROWS, folder)
    return max(1, min(count, data.max_samples or count)), examples


def examples_of(prepared: Prepared, config: Config, rows: int) -> Table:
    """The first rows of token shards as the model receives them."""
    loader = StepLoader(prepared.train_dir, prepared.objective, config.data, config.model, config.run.seed)
    return table_of_shards(config.data, prepared, loader, Tokenizer.load(prepared.tokenizer_dir), rows)
