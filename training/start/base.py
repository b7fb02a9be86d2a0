"""Which model does a run start from, and what does that imply?

A folder that the user names is taken, and all else that is found by itself is told before anything else: what it is, why
it, and what other starts there are. A pretraining run is found by itself only where its shape is not another than the one
asked for, and its tokenizer suits the data (`data.prepare.estimate`); else weights are random. A checkpoint of the Hugging Face hub
gets here by a command that is told, or, where the user allows it, at once; `HF_ENDPOINT` names a mirror, for both ways.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from pathlib import Path, PurePath

from config import PREFERENCES, Config, T5ModelConfig, UserError
from data.prepare.estimate import misfit
from data.prepare.looking import ask
from language import say
from model.formats.shape_file import CONFIG_FILE, read_config
from model.shapes import weight_counts
from run_files import SETTINGS_FILE
from settings.fields import AUTO
from storage import read_text
from training.checkpoints.folder import Checkpoints
from training.checkpoints.runs import ADAPTER_FILES, model_folder, near_folder, newest_run
from training.start.adapted import check_trained, home_of, with_form_of

MODEL_FIELDS = tuple(f.name for f in dataclasses.fields(T5ModelConfig))
NOT_OF_SHAPE = (
    "dropout_rate",
    "vocab_size",
    "pad_token_id",
    "eos_token_id",
    "decoder_start_token_id",
)  # the tokenizer's, or of training alone
NAMED = ("flag", "file", "edited")  # origins of what a user has chosen
MODELS_DIR = "models"
# beginning of a checkpoint's name -> whose it is, of those that docs/finetuning.md names
OWNERS = {
    "flan-t5": "google", "t5-v1_1": "google", "mt5": "google", "umt5": "google", "byt5": "google", "t5-": "google-t5",
    "ChatLM": "charent", "mengzi-t5": "Langboat", "codet5": "Salesforce",
}  # fmt: skip
FETCHED = ("config.json", "*.safetensors", "*.safetensors.index.json", "tokenizer*", "spiece.model", "special_tokens_map.json",
         "added_tokens.json", "chat_template.jinja", "vocab.json", "merges.txt", "generation_config.json")  # fmt: skip
PICKLES = ("pytorch_model*.bin*",)  # of older checkpoints, which have no other weights
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def choose_base(config: Config, run_dir: Path | None) -> tuple[Path | None, list[str]]:
    """Choose the folder whose weights a run starts from.

    Args:
        run_dir: of the run that is resumed; its newest checkpoint goes before all others.
    Returns:
        the folder, None for random weights; and what is to be told of a choice that the user did not make.
    Raises:
        UserError: what was named is not there, or preferences have nothing to start from.
    """
    told = []
    if run_dir is not None:
        latest = Checkpoints(run_dir, config.train.keep_latest_n_ckp).latest()
        if latest is not None:
            return latest, []
        told.append(say("{run} was stopped before its first checkpoint: it starts again from step 1", run=run_dir.name))
    base, why = _first_base(config)
    return base, [*told, *why]


def planned_start(config: Config, run_dir: Path | None = None) -> tuple[Config, list[str]]:
    """The settings with shape, tokenizer and adapters' form of what a run of them would start from; and what is told.

    Args:
        run_dir: as of `choose_base`.
    Raises:
        UserError: as `choose_base`.
    """
    base, told = choose_base(config, run_dir)
    if base is not None:
        home = home_of(base, config)
        shape = dataclasses.replace(read_config(home), dropout_rate=config.model.dropout_rate)
        known = config.data.tokenizer_dir if config.data.tokenizer_dir != AUTO else str(home)
        config = with_form_of(dataclasses.replace(config.changed(tokenizer_dir=known), model=shape), base)
        told = told or [f"starts from {base}"]
    if problems := check_trained(config, base):
        raise UserError(*problems)
    return config, told


def _first_base(config: Config) -> tuple[Path | None, list[str]]:
    named = config.train.finetune_from
    if named not in (AUTO, None):
        return _named_base(config, str(named)), []
    if config.data.objective == PREFERENCES:
        return _preference_base(config)
    if not config.train.is_finetune:
        return None, []
    if named is None:
        return None, [_random(say("as --finetune_from=none asks"), config)]
    run = newest_run(config.run.output_dir, "pretrain", needs_model=True)
    found = None if run is None else model_folder(run)
    if found is None:
        why_not = say("there is no pretraining run in {folder}", folder=config.run.output_dir)
        return None, [_random(why_not, config)]
    shape = read_config(found)
    asked = [
        name for name in (*MODEL_FIELDS, "model_preset") if config.origin(name) in NAMED and name != "dropout_rate"
    ]
    other = [
        name
        for name in MODEL_FIELDS
        if (name not in NOT_OF_SHAPE or name in asked) and getattr(shape, name) != getattr(config.model, name)
    ]
    if asked and other:
        name = asked[0]
        value = config.model_preset if name == "model_preset" else getattr(config.model, name)
        told = "{model} is of another shape than --{name}={value} asks for"
        return None, [_random(say(told, model=str(found), name=name, value=value), config)]
    problem = ask(config, misfit, config, found)
    if not problem:
        return found, [_taken(found)]
    told = "{model} is not taken unless it is named: {problem}"
    return None, [_random(say(told, model=str(found), problem=problem), config)]


def _others() -> str:
    return say("other starts: --finetune_from=FOLDER (docs/finetuning.md says where checkpoints are)")


def _taken(folder: Path) -> str:
    shape = read_config(folder)
    sample = say("; it has seen nothing but the built-in sample") if _saw_the_sample(folder) else ""
    return say(
        "starts from {model}, the newest pretraining run ({weights} weights, {tokens} tokens), as --finetune_from names no other: "
        "its shape and its tokenizer are used{sample}; {others}, or --finetune_from=none for random weights",
        model=str(folder), weights=f"{weight_counts(shape)['total']:,}", tokens=f"{shape.vocab_size:,}", sample=sample,
        others=_others(),
    )  # fmt: skip


def _random(why: str, config: Config) -> str:
    given = config.data.tokenizer_dir
    return say(
        "starts from random weights, {why}: the model ({preset}) will know nothing but this data, with {tokenizer}; some "
        "thousand pairs are few for that. {others}",
        why=why, preset=config.model_preset, others=_others(),
        tokenizer=say("a tokenizer trained on it") if given == AUTO else given,
    )  # fmt: skip


def _saw_the_sample(folder: Path) -> bool:
    run_dir = folder if (folder / SETTINGS_FILE).is_file() else folder.parent.parent
    try:
        settings = json.loads(read_text(run_dir / SETTINGS_FILE))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(settings, dict) and "train_file" in settings and settings["train_file"] is None


def _named_base(config: Config, named: str) -> Path:
    folder = Path(named)
    if _holds_model(folder):
        return folder
    if not folder.is_dir() and _HUB_NAME.fullmatch(named):
        fetched = Path(MODELS_DIR, folder.name)
        if config.train.allow_download:
            return download(named, fetched)
        if _holds_model(fetched):
            raise UserError(f"--finetune_from = {named}, no such folder, but {fetched} is there; name that")
        if near := near_folder(named):  # misspelt, and not a checkpoint of the hub
            raise UserError(f"--finetune_from = {named}, no such folder{near}")
        told = "--finetune_from = {folder}, no such folder; {how}"
        raise UserError(say(told, folder=named, how=how_to_fetch(named, fetched)))
    if folder.is_dir():
        pickled = any(folder.glob("pytorch_model*.bin"))
        convert = f"python train_low_mem.py convert --model={folder} --output={folder}-plain --allow_pickle=True"
        hint = f"; turn its pytorch_model.bin into it: {convert}" if pickled else ""
        what = f"holds no {CONFIG_FILE}" + hint
    else:
        what = "is a file" if folder.exists() else f"no such folder{near_folder(folder)}"
    raise UserError(
        f"--finetune_from = {folder}, {what}; name a folder with {CONFIG_FILE}, model.safetensors and "
        "tokenizer.json or spiece.model, such as `hf download google/flan-t5-small --local-dir models/flan-t5-small` fetches"
    )


def _holds_model(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (CONFIG_FILE, ADAPTER_FILES[0]))


def _preference_base(config: Config) -> tuple[Path, list[str]]:
    runs = (newest_run(config.run.output_dir, kind, needs_model=True) for kind in ("finetune", "pretrain"))
    found = next((model_folder(run) for run in runs if run is not None), None)
    if found is None:
        raise UserError(
            f"--finetune_from = {config.train.finetune_from}, there is no trained model in {config.run.output_dir}, and "
            "preferences need one to continue from; name a model folder, or finetune first"
        )
    return found, [
        say("starts from {model}, the newest run, and compares with it; {others}", model=str(found), others=_others())
    ]


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
            f"  python train_low_mem.py convert --model={folder} --output={folder}-plain --allow_pickle=True"
        )
    return folder
