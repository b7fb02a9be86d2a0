"""`tokenizer`: train one, and report how many letters a token has."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

from commands.new_folder import held_output
from data.prepare.data_tokenizer import read_extra_tokens, tokenizer_quality, tokenizer_type_of, train_data_tokenizer
from data.prepare.looking import look, tokenizer_limits
from data.prepare.training_data import find_training_data
from data.sources.places import public
from data.tokenizers.tokenizer import Tokenizer
from settings.declared import Config
from settings.errors import UserError
from settings.fields import AUTO
from settings.program import program
from support.language import say
from support.storage import make_folder, rename, writing
from training.report.progress import Progress

TOKENIZER_FILE = "tokenizer.json"
# Settings of the rows that `train` reads like this command; those that are given are repeated in the next command.
OF_ROWS = (
    "train_file",
    "text_column",
    "label_column",
    "prepare_text",
    "prompt_column",
    "response_column",
    "messages_column",
    "objective",
    "is_finetune",
    "head",
)


def tokenizer(config: Config) -> None:
    """Train a tokenizer on `train_file` and write it to `tokenizer_dir`, by default `output_dir`/tokenizer.

    Raises:
        UserError: there is one already, the data cannot be read, or the folder cannot be written.
    Memory:
        that of `data.prepare.looking.tokenizer_limits`.
    """
    folder = Path(config.data.tokenizer_dir)
    if config.data.tokenizer_dir == AUTO:
        folder = Path(config.run.output_dir) / "tokenizer"
    if (folder / TOKENIZER_FILE).exists() and not config.run.overwrite:
        raise UserError(
            say(
                "--tokenizer_dir = {folder}, holds a tokenizer; choose another folder or use --overwrite=True",
                folder=folder,
            )
        )
    with held_output(folder / TOKENIZER_FILE, "tokenizer_dir"):
        data = look(config, find_training_data, config.data, config.train.is_finetune)
        if data.shards is not None:
            raise UserError(
                say(
                    "--train_file = {shards}, holds token shards, no text; give the text they were made from",
                    shards=data.shards,
                )
            )
        show = Progress(1)
        kind = look(config, tokenizer_type_of, config.data, config.tokenizer.tokenizer_type, data)
        show.note(say("training a {kind} tokenizer, to be written to {folder}", kind=kind, folder=folder))
        with writing("cache_dir", config.data.cache_dir):  # A sample that is too large for memory lies there.
            make_folder(Path(config.data.cache_dir))
        limits = tokenizer_limits(config.memory.memory_budget)
        trained = look(config, train_data_tokenizer, config.data, kind, config.model.vocab_size, data, limits)
        partial = folder / ".tmp"  # inside: the folder may be a disk of its own
        try:
            with writing("tokenizer_dir", folder):
                shutil.rmtree(partial, ignore_errors=True)
                trained.save(partial)
                if config.data.extra_tokens is not None:
                    trained.save_extended(read_extra_tokens(config.data.extra_tokens), partial)
                    trained = Tokenizer.load(partial)
                (folder / TOKENIZER_FILE).unlink(missing_ok=True)  # A kill must not leave a mixture that looks whole.
                for path in sorted(partial.iterdir(), key=lambda path: path.name == TOKENIZER_FILE):
                    rename(path, folder / path.name)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        rows: list[tuple[str, str]] = [
            (say("folder"), str(folder)),
            (
                say("ids"),
                say(
                    "{count}, {sentinels} of them sentinels", count=f"{trained.size:,}", sentinels=trained.num_sentinels
                ),
            ),
        ]
        vocab_size = config.model.vocab_size
        if trained.size < vocab_size and kind not in ("byte", "letters"):
            rows.append((say("requested"), say("{count}; the text yields no more", count=f"{vocab_size:,}")))
        rows += (
            (name, str(measured))
            for name, measured in look(config, tokenizer_quality, config.data, data, trained).items()
        )
        values = {name: public(str(value)) for name, value in config.as_dict().items() if name in OF_ROWS}
        words = [f"--{name}={shlex.quote(value)}" for name, value in values.items() if config.is_on_command_line(name)]
        words.append(f"--tokenizer_dir={shlex.quote(str(folder))}")
        rows.append((say("next"), f"{program()} train {' '.join(words)}"))
        show.table(say("{kind} tokenizer", kind=kind), rows)
