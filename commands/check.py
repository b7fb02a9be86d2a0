"""`check`: a folder's files against their checksums, or the weights' own headers where there are none."""

from __future__ import annotations

from pathlib import Path

from model.formats.adapter_folder import is_adapter, read_info
from model.formats.checksums import damages, read_sums
from model.formats.sentence_transformers import encoder_folder
from model.formats.tensor_files import TensorFolder
from settings.declared import Config
from settings.errors import UserError, refuse
from settings.fields import counted
from support.language import say
from training.report.progress import Progress
from training.saved_model import find_model


def check(config: Config) -> list[tuple[str, str]]:
    """Compare the files of `--model`: of a run's model and all of its checkpoints, of one checkpoint, or of any model
    folder.

    Returns:
        each folder with how its files were checked.
    Raises:
        UserError: each file that is damaged or missing; or no such folder.
    Memory: 1 MiB. Time: one reading of all files.
    """
    model = Path(config.checkpoint.model)
    folder = model if model.is_dir() else find_model(config).folder
    folders = sorted((folder / "checkpoints").glob("step_*"), reverse=True)
    if not folders or any(folder.glob("*.safetensors")) or read_sums(folder) is not None:
        folders.insert(0, folder)
    intact: list[tuple[str, str]] = []
    problems: list[str] = []
    for each in folders:
        found_damages = damages(each)
        for damage in found_damages:
            text = "--model = {model}, {damage}; copy it again, or use another folder"
            problems.append(say(text, model=model, damage=damage))
        if found_damages:
            continue
        try:
            intact.append((str(each), description(each)))
        except UserError as error:
            problems.extend(error.problems)
    refuse(problems)
    Progress(1).table(say("intact"), intact)
    return intact


def description(folder: Path) -> str:
    """How the files of a folder without damages were checked.

    Raises:
        UserError: they cannot be opened.
    """
    sums = read_sums(folder)
    if sums is not None:
        return say("{files} match their checksums", files=counted(len(sums["files"]), "file"))
    if is_adapter(folder):
        read_info(folder)
        return say("no checksums to compare; the adapter can be opened")
    return say(
        "no checksums to compare; {tensors} can be opened",
        tensors=counted(len(TensorFolder(encoder_folder(folder)).names), "tensor"),
    )
