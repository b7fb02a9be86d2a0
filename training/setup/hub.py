"""The Hugging Face hub: checkpoints fetched from it, as a command to type or, where the user asks for it, at once; and
the finished model uploaded with `push_to_hub`.

`HF_ENDPOINT` names a mirror. Whoever uploads is logged in by `hf auth login` or `HF_TOKEN`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path, PurePath, PurePosixPath

from model.formats.headers import WEIGHTS_FILE
from model.formats.sentence_transformers import DENSE_FOLDER
from settings.errors import UserError
from settings.fields import TRUE_WORDS, near_path
from settings.program import needs, program
from support.child_process import ChildDied, call
from support.language import say
from training.report.card import OWN_FILES, push_command

MODELS_DIR = "models"
HUB_PACKAGE = "huggingface_hub"
# The address of a model, with its revision.
ADDRESS = re.compile(r"hf://(?:models/)?(([\w.-]+/[\w.-]+)(?:@([^@\s]+))?)")
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
# The owners of the checkpoints that docs/finetuning.md names, by how their names begin.
OWNERS = {
    "flan-t5": "google",
    "t5-v1_1": "google",
    "mt5": "google",
    "umt5": "google",
    "byt5": "google",
    "t5-": "google-t5",
    "ChatLM": "charent",
    "mengzi-t5": "Langboat",
    "codet5": "Salesforce",
    "gtr-t5": "sentence-transformers",
    "sentence-t5": "sentence-transformers",
    "instructor": "hkunlp",
}
FETCHED = (
    "config.json",
    "*.safetensors",
    "*.safetensors.index.json",
    "tokenizer*",
    "spiece.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "generation_config.json",
    "modules.json",
    "config_sentence_transformers.json",
    "sentence_bert_config.json",
    "[0-9]_*/*.json",
    "[0-9]_*/spiece.model",
)
DENSE_PICKLE = f"{DENSE_FOLDER}/pytorch_model.bin"
PICKLES = ("pytorch_model*.bin*", "[0-9]_*/pytorch_model*.bin*")  # Older checkpoints have no other weights.


def fetch_model(name: str, allow_download: bool, holds_model: Callable[[Path], bool]) -> Path | None:
    """The folder of a checkpoint that is named as the hub names it, fetched if need be; None: it is not named so.

    Args:
        name: `hf://OWNER/NAME`, which is fetched at once, or `OWNER/NAME`.
        holds_model: whether a folder can be trained from.
    Raises:
        UserError: it may not be downloaded, or the hub did not give it.
    """
    if name.startswith("hf://"):
        address = ADDRESS.fullmatch(name)
        if address is None:
            raise UserError("--finetune_from = {named}, is not a model on the hub; write hf://OWNER/NAME", named=name)
        whole, repository, revision = address.groups()
        return download(repository, Path(MODELS_DIR, whole.replace("/", "--", 1)), revision)
    if not _HUB_NAME.fullmatch(name):
        return None
    fetched = Path(MODELS_DIR, Path(name).name)
    if allow_download:
        return download(name, fetched)
    if holds_model(fetched):
        text = "--finetune_from = {named}, no such folder, but {fetched} is there; give that"
        raise UserError(text, named=name, fetched=fetched)
    near = near_path(name)  # It may be a misspelt folder, and no checkpoint of the hub.
    if near:
        raise UserError("--finetune_from = {named}, no such folder{near}", named=name, near=near)
    text = "--finetune_from = {folder}, no such folder; {how}"
    raise UserError(text, folder=name, how=how_to_fetch(name, fetched))


def how_to_fetch(name: str, folder: Path) -> str:
    """The command that fetches a checkpoint, and what can be done where the hub cannot be reached."""
    fetch = f'hf download {name_on_hub(name)} --local-dir {folder} --exclude "*.[hm][5s]*"'
    return say(
        "if it is a checkpoint on the Hugging Face hub, download it (or add --allow_download=True) and give "
        "{folder}:\n  {fetch}\nfrom a mirror:\n  HF_ENDPOINT=https://hf-mirror.com {fetch}\nneeded: config.json, "
        "model.safetensors, and tokenizer.json or spiece.model; `convert` turns a pytorch_model.bin into one",
        folder=folder,
        fetch=fetch,
    )


def name_on_hub(name: str) -> str:
    """Owner and name on the hub of what somebody has named, who may have named a folder: `models/flan-t5-small`."""
    path = PurePath(name)
    if len(path.parts) == 2 and path.parts[0] not in (MODELS_DIR, ".", ".."):
        return name
    owner = next((owner for start, owner in OWNERS.items() if path.name.startswith(start)), "OWNER")
    return f"{owner}/{path.name}"


def download(name: str, folder: Path, revision: str | None = None) -> Path:
    """Fetch a checkpoint into a folder; files that are there and whole are kept.

    Args:
        revision: branch, tag or commit; None: the main branch.

    Raises:
        UserError: huggingface_hub is not installed, or the hub did not give it, or it is in an old format.
    """
    hub = needs(HUB_PACKAGE, f"--finetune_from = {name}")
    try:
        files = hub.list_repo_files(name, revision=revision)
        has_plain = any(file.endswith(".safetensors") for file in files)
        patterns = list(FETCHED if has_plain else FETCHED + PICKLES)
        # Of some models of sentence-transformers the dense layer alone is a pickle.
        patterns += [file for file in files if file.endswith(DENSE_PICKLE) and _plain(file) not in files]
        hub.snapshot_download(name, local_dir=str(folder), allow_patterns=patterns, revision=revision)
    except Exception as error:  # Many libraries have errors for the network, rights and names.
        raise UserError(
            "--finetune_from = {name}, {hub} did not give it ({reason}); check the name and the network, or "
            "{how_to_fetch}",
            name=name,
            hub=_hub(),
            reason=_reason(error),
            how_to_fetch=how_to_fetch(name, folder),
        ) from None
    if not has_plain:
        raise UserError(
            "--finetune_from = {name}, is in {folder} now, as a pickle; turn it into a plain folder, and name "
            "that:\n  {program} convert --model={folder} --output={folder}-plain --allow_pickle=True",
            name=name,
            folder=folder,
            program=program(),
        )
    return folder


def _plain(pickle: str) -> str:
    """The file that holds the same without a pickle."""
    return str(PurePosixPath(pickle).with_name(WEIGHTS_FILE))


def check_push(name: str) -> None:
    """Find, before anything is done, whether somebody is logged in who may upload.

    Raises:
        UserError: the name is none of a repository, the package is missing, or the hub does not know the user.
    """
    if name.lower() in TRUE_WORDS or not re.fullmatch(r"([\w.-]+/)?[\w.-]+", name):
        raise UserError(
            "--push_to_hub = {name}, is not a name of a repository; write OWNER/NAME, or NAME for one of yours",
            name=name,
        )
    _ask(name, "whoami")


def create_repository(name: str) -> None:
    """Make the repository that a run will be uploaded to, where there is none yet."""
    _ask(name, "create_repo", name, exist_ok=True)


def push(name: str, folder: Path) -> str:
    """Upload a finished model with its card.

    Returns:
        the address of what was uploaded.
    Raises:
        UserError: the hub did not take it; how to do so by hand.
    """
    try:
        return _ask(name, "upload_folder", repo_id=name, folder_path=str(folder), ignore_patterns=list(OWN_FILES))
    except UserError as error:
        problem = say(
            "{problems}; the model is done, in {folder}; upload it later: {command}",
            problems=error.problems[0],
            folder=folder,
            command=push_command(folder, name),
        )
        raise UserError(problem) from None


def _ask(name: str, method: str, *arguments: str, **more: object) -> str:
    """What a method of the hub's client answers, in a child: its libraries take 60 MB."""
    try:
        return call(_answer, name, method, arguments, more)
    except ChildDied as died:
        raise UserError(
            "--push_to_hub = {name}, uploading has ended without an answer ({died})", name=name, died=died
        ) from None


def _answer(name: str, method: str, arguments: tuple[str, ...], more: dict[str, object]) -> str:
    hub = needs(HUB_PACKAGE, f"--push_to_hub = {name}")
    if hub.get_token() is None:
        raise UserError("--push_to_hub = {name}, nobody is logged in; run: hf auth login", name=name)
    try:
        api = hub.HfApi()
        if method == "upload_folder" and "/" not in name:
            more["repo_id"] = f"{api.whoami()['name']}/{name}"
        return str(getattr(api, method)(*arguments, **more))
    except Exception as error:  # Many libraries have errors for the network, rights and names.
        text = "{hub} refuses ({reason}); check the name, the network and the rights of `hf auth whoami`"
        refusal = say(text, hub=_hub(), reason=_reason(error))
        raise UserError("--push_to_hub = {name}, {told}", name=name, told=refusal) from None


def _hub() -> str:
    return os.environ.get("HF_ENDPOINT", say("the Hugging Face hub"))


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
