"""Checkpoints of the Hugging Face hub: the command that fetches one, and, where the user allows it, fetching it at once.

`HF_ENDPOINT` names a mirror, for both ways.
"""

from __future__ import annotations

import os
from pathlib import Path, PurePath

from language import say
from settings.errors import UserError
from settings.program import program

MODELS_DIR = "models"
# beginning of a checkpoint's name -> whose it is, of those that docs/finetuning.md names
OWNERS = {
    "flan-t5": "google", "t5-v1_1": "google", "mt5": "google", "umt5": "google", "byt5": "google", "t5-": "google-t5",
    "ChatLM": "charent", "mengzi-t5": "Langboat", "codet5": "Salesforce",
}  # fmt: skip
FETCHED = ("config.json", "*.safetensors", "*.safetensors.index.json", "tokenizer*", "spiece.model", "special_tokens_map.json",
         "added_tokens.json", "chat_template.jinja", "vocab.json", "merges.txt", "generation_config.json")  # fmt: skip
PICKLES = ("pytorch_model*.bin*",)  # of older checkpoints, which have no other weights


def how_to_fetch(name: str, folder: Path) -> str:
    """The command that fetches a checkpoint, and what can be done where the hub cannot be reached."""
    fetch = f'hf download {name_on_hub(name)} --local-dir {folder} --exclude "*.[hm][5s]*"'
    return say(
        "where it is a checkpoint of the Hugging Face hub, fetch it (or add --allow_download=True) and name {folder}:\n  {fetch}\n"
        "by a mirror:\n  HF_ENDPOINT=https://hf-mirror.com {fetch}\n"
        "needed: config.json, model.safetensors, and tokenizer.json or spiece.model; of a pytorch_model.bin `convert` makes one",
        folder=folder, fetch=fetch,
    )  # fmt: skip


def name_on_hub(name: str) -> str:
    """Owner and name on the hub of what somebody has named, who may have named a folder: `models/flan-t5-small`."""
    path = PurePath(name)
    if len(path.parts) == 2 and path.parts[0] not in (MODELS_DIR, ".", ".."):
        return name
    owner = next((owner for start, owner in OWNERS.items() if path.name.startswith(start)), "OWNER")
    return f"{owner}/{path.name}"


def download(name: str, folder: Path) -> Path:
    """Fetch a checkpoint into a folder; files that are there and whole are kept.

    Raises:
        UserError: huggingface_hub is not installed, or the hub did not give it, or it is in an old format.
    """
    try:
        from huggingface_hub import list_repo_files, snapshot_download
    except ImportError:
        raise UserError(
            f"--allow_download = True, needs huggingface_hub (pip install huggingface_hub); or {how_to_fetch(name, folder)}"
        ) from None
    try:
        has_plain = any(file.endswith(".safetensors") for file in list_repo_files(name))
        wanted = list(FETCHED if has_plain else FETCHED + PICKLES)
        snapshot_download(name, local_dir=str(folder), allow_patterns=wanted)
    except Exception as error:  # of many libraries: network, rights, names
        reason = " ".join(str(error).split())[:200]
        where = os.environ.get("HF_ENDPOINT", "the Hugging Face hub")
        raise UserError(
            f"--finetune_from = {name}, {where} did not give it ({type(error).__name__}: {reason}); check the name and the "
            f"network, or {how_to_fetch(name, folder)}"
        ) from None
    if not has_plain:
        raise UserError(
            f"--finetune_from = {name}, is in {folder} now, as a pickle; turn it into a plain folder, and name that:\n"
            f"  {program()} convert --model={folder} --output={folder}-plain --allow_pickle=True"
        )
    return folder
