"""The folder or file that a command writes: whole or not there, and what is refused beforehand."""

from __future__ import annotations

import functools
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from data.tokenizers.published import has_tokenizer
from data.tokenizers.tokenizer import Tokenizer
from model.formats.answering import GENERATION_FILE, keep_answer_list, published_generation
from model.formats.checksums import CARD_FILE, CHECKSUMS_FILE, read_sums, seal
from model.formats.headers import read_json
from model.formats.sentence_transformers import TextSettings, write_text_settings
from model.formats.shape_file import CONFIG_FILE, published_names
from settings.declared import Config
from settings.errors import UserError, reason_of, refuse
from settings.fields import listed
from support.language import say
from support.storage import InUse, atomic_folder, exclusive, make_folder, restore_folder
from training.checkpoints.runs import check_writable
from training.processes.launch import num_processes
from training.report.card import has_own_words
from training.report.progress import Progress
from training.report.run_files import RUN_FILE
from training.saved_model import READING_SETTINGS, SavedModel

if TYPE_CHECKING:
    from torch import Tensor

    from model.t5 import T5

Result = TypeVar("Result")


def holding_output(command: Callable[[Config], Result]) -> Callable[[Config], Result]:
    """A command that holds its `--output` from its first moment to its last; see `held_output`.

    Of several processes none does: commands that write refuse them themselves.
    """

    @functools.wraps(command)
    def holding(config: Config) -> Result:
        if config.answer.output is None or num_processes() > 1:
            return command(config)
        with held_output(Path(config.answer.output)):
            return command(config)

    return holding


@contextmanager
def held_output(output: Path, flag: str = "output") -> Iterator[None]:
    """The right to write a file or a folder, until the context ends or its process does.

    The lock is that of a run of this name, so that no run is trained while it is replaced.

    Args:
        flag: the setting that names it.
    Raises:
        UserError: another process writes it, or the folder around it cannot be written.
    """
    real = output.resolve()  # By whatever name or link it is called, it is one output.
    refuse(check_writable(flag, real.parent))
    missing = [folder for folder in real.parents if not folder.exists()]
    with ExitStack() as stack:
        try:
            make_folder(real.parent)
            has_locks = stack.enter_context(exclusive(real.parent / f".{real.name}.lock"))
        except InUse:
            raise UserError(
                "--{flag} = {path}, is in use: another process writes it; wait for its end, stop it, or choose "
                "another name",
                flag=flag,
                path=output,
            ) from None
        except OSError as error:
            raise UserError(
                "--{flag} = {path}, cannot be written: {reason}; choose another folder",
                flag=flag,
                path=output,
                reason=reason_of(error),
            ) from None
        if not has_locks:
            text = "--{flag} = {path}, is on a file system without locks: see that no other process writes it"
            Progress(1, stream=sys.stderr).warn(say(text, flag=flag, path=output))
        try:
            yield
        finally:
            stack.close()
            with suppress(OSError):  # Folders that hold the output stay.
                for folder in missing:
                    folder.rmdir()


@contextmanager
def new_folder(name: str | None, overwrite: bool, *sources: Path) -> Iterator[Path]:
    """An empty folder to fill; it becomes `name` when the context ends without an error.

    A README.md that its owner has written stays: it is in the folder from the beginning.

    Args:
        name: the setting `output`. overwrite: whether it may replace one that exists.
        sources: folders that are read, which it may not be.
    Raises:
        UserError: no name, one that exists, is read or holds what others have written, or a disk that cannot be
            written.
    """
    if name is None:
        raise UserError("--output = none, is needed: the folder to write")
    output = Path(name)
    if not output.name or output.name == "..":
        raise UserError(
            "--output = {named}, has no name that another folder could take; give a folder in it", named=name
        )
    if output.is_symlink():  # What it leads to is replaced: the user has put it there, perhaps on another disk.
        output = output.resolve()
    restore_folder(output)
    if any(source.resolve().is_relative_to(output.resolve()) for source in sources):
        raise UserError(
            "--output = {output}, is the folder that is read, or holds it; choose another one", output=output
        )
    if output.exists():
        _check_replaceable(output, overwrite)
    try:
        with atomic_folder(output) as folder:
            if has_own_words(output):
                shutil.copyfile(output / CARD_FILE, folder / CARD_FILE)
            yield folder
            seal(folder)
    except OSError as error:
        raise UserError(
            "--output = {output}, cannot be written: {reason}; choose another folder",
            output=output,
            reason=reason_of(error),
        ) from error


def _check_replaceable(output: Path, overwrite: bool) -> None:
    """Refuse to replace what the user may want to keep: an empty folder, a run, and files that this program has written
    may go.
    """
    files = sorted(path.name for path in output.iterdir()) if output.is_dir() else [output.name]
    if files and not overwrite:
        raise UserError("--output = {output}, exists; choose another folder or use --overwrite=True", output=output)
    if not output.is_dir() or os.path.ismount(output):
        what = say("a disk that is mounted there") if output.is_dir() else say("a file")
        raise UserError(
            "--output = {output}, is {what} and can be no new folder; give a folder in it, or another one",
            output=output,
            what=what,
        )
    if (output / RUN_FILE).is_file():
        return
    sums = read_sums(output) or {"files": ()}
    ours = {CHECKSUMS_FILE, *(file.partition("/")[0] for file in sums["files"])}
    if (output / CARD_FILE).is_file():
        ours.add(CARD_FILE)
    foreign = [file for file in files if file not in ours]
    if foreign:
        raise UserError(
            "--output = {output}, holds what this program has not written ({others}) and is not replaced; choose "
            "another folder",
            output=output,
            others=listed(foreign[:3]),
        )


def refuse_not_finite(model: T5, *sources: Path) -> None:
    """Refuse to publish weights with inf or nan: who loads them gets nothing else.

    Args:
        model: as it is to be written. sources: the folders that it comes from.
    Raises:
        UserError: a tensor, by its name in the file, is not finite.
    """
    names = published_names(model.config)
    refuse_tensors_not_finite({names[name]: weight for name, weight in model.named_parameters()}, *sources)


def refuse_tensors_not_finite(tensors: Mapping[str, Tensor], *sources: Path) -> None:
    """The same of tensors by their names in the file."""
    names = names_not_finite(tensors)
    if names:
        raise UserError(
            "{folder}, holds inf or nan in {tensors}; nothing is written. Give an earlier checkpoint, or copy the "
            "folder again",
            folder=", ".join(map(str, sources)),
            tensors=listed(names),
        )


def names_not_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    """Which tensors hold inf or nan. Memory: none, as the least and the largest number tell both."""
    bounds = {name: tensor.detach().aminmax() for name, tensor in tensors.items() if tensor.numel()}
    return [name for name, (least, largest) in bounds.items() if not (least.isfinite() and largest.isfinite())]


def check_output(file: Path, overwrite: bool) -> None:
    """Refuse a file that exists and may not be replaced, or that cannot be written."""
    if file.exists() and file.stat().st_size and not overwrite:
        raise UserError(
            "--output = {path}, is there already; choose another file, or replace it with --overwrite=True", path=file
        )
    refuse(check_writable("output", file.parent))


def copy_companions(model: SavedModel, folder: Path) -> int | None:
    """Put the tokenizer, the published generation settings, the list of answers and the prompts of a model beside its
    new weights.

    Args:
        folder: where `hf_format.save` has written.
    Returns:
        the tokenizer's number of ids; None where there is none.
    Raises:
        UserError: the tokenizer is broken.
    """
    for layer in reversed(model.layers):  # An adapter goes before its base.
        keep_generation_settings(layer, folder)
    if model.has_head_of_base:
        keep_label_names(model.base, folder)
    if (folder / GENERATION_FILE).is_file():  # The model writes text.
        keep_answer_list(folder, model.top, model.base)
    write_text_settings(folder, TextSettings(**model.settings_of(*READING_SETTINGS)))
    if not has_tokenizer(model.tokenizer):
        return None
    tokenizer = Tokenizer.load(model.tokenizer)
    tokenizer.save(folder)
    return tokenizer.size


def keep_generation_settings(source: Path, folder: Path) -> None:
    """What the publisher says of generating stays, but for the special tokens, which are ours by now; an encoder
    generates nothing.

    Raises:
        UserError: the publisher's file is broken.
    """
    path = folder / GENERATION_FILE
    if not path.is_file():
        return
    _, published = published_generation(source)
    ours = json.loads(path.read_text(encoding="utf8"))
    ends = published.get("eos_token_id")
    if isinstance(ends, list) and ours.get("eos_token_id") in ends:  # Several may end an answer elsewhere.
        ours["eos_token_id"] = ends
    path.write_text(json.dumps({**published, **ours}, indent=2) + "\n", encoding="utf8")


def keep_label_names(source: Path, folder: Path) -> None:
    """Labels keep the publisher's names where ours are numbers alone: a regression's one, and names with commas in
    them.

    Args:
        source: the folder whose labels were read. folder: the new one, with its `config.json`.
    """
    published = read_json(source / CONFIG_FILE).get("id2label")
    path = folder / CONFIG_FILE
    config = read_json(path)
    names = list(config.get("id2label", {}).values())
    numbers = [str(number) for number in range(len(names))]
    is_unnamed = names in (numbers, [f"LABEL_{number}" for number in numbers])
    if not names or not is_unnamed or not isinstance(published, dict) or {*published} != {*numbers}:
        return
    config["id2label"] = {number: str(published[number]) for number in numbers}
    config["label2id"] = {name: int(number) for number, name in config["id2label"].items()}
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf8")
