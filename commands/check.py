"""`check`: a folder's files against their checksums, or the weights' own headers where there are none."""

from __future__ import annotations

from pathlib import Path

from commands.loading import find_model
from language import say
from model.formats.adapter_folder import is_adapter, read_info
from model.formats.checksums import damages, read_sums
from model.formats.tensor_files import TensorFolder
from settings.declared import Config
from settings.errors import UserError, refuse
from settings.fields import counted
from training.report.progress import Progress


def check(config: Config) -> list[tuple[str, str]]:
    """Compare the files of `--model`: of a run's model and all of its checkpoints, of one checkpoint, or of any model folder.

    Returns:
        folder and what was found, of each.
    Raises:
        UserError: each file that is damaged or missing; or no such folder.
    Memory: 1 MiB. Time: one reading of all files.
    """
    named = Path(config.checkpoint.model)
    whole, problems = list[tuple[str, str]](), list[str]()
    home = named if named.is_dir() else find_model(config).folder
    folders = sorted((home / "checkpoints").glob("step_*"), reverse=True)
    if not folders or any(home.glob("*.safetensors")) or read_sums(home) is not None:
        folders = [home, *folders]
    for folder in folders:
        found = damages(folder)
        problems += [
            say("--model = {named}, {damage}; copy it again, or use another folder", named=named, damage=damage)
            for damage in found
        ]
        if not found:
            try:
                whole.append((str(folder), _describe(folder)))
            except UserError as error:
                problems += error.problems
    refuse(problems)
    Progress(1).table(say("whole"), whole)
    return whole


def _describe(folder: Path) -> str:
    sums = read_sums(folder)
    if sums is not None:
        return say("{files} match their checksums", files=counted(len(sums["files"]), "file"))
    if is_adapter(folder):
        read_info(folder)
        return say("no checksums to compare; the adapter can be opened")
    return say(
        "no checksums to compare; {tensors} can be opened", tensors=counted(len(TensorFolder(folder).names), "tensor")
    )
