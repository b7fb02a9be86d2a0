"""Stage 2: the weights that a run starts from, and what follows from them: shape, tokenizer, adapters, how answers are written.

A folder that the user names is taken. What is found instead is told first: what it is, why it, and what other starts there are. A
pretraining run is found only where its shape is not another than the one asked for, and its tokenizer suits the data
(`data.prepare.estimate`); else weights are random.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

from data.prepare.data_tokenizer import read_extra_tokens
from data.prepare.estimate import misfit
from data.prepare.looking import ask
from data.prepare.training_data import file_problems
from data.tokenizers.tokenizer import Tokenizer
from language import say
from model.formats.adapter_folder import is_adapter, read_info
from model.formats.answering import HEEDED, answers_by, remarks
from model.formats.checksums import refuse_damaged
from model.formats.headers import TensorHeaders
from model.formats.shape_file import CONFIG_FILE, misfits, read_config
from model.shapes import weight_counts
from settings.consistency import PREFERENCES, check, ranking_problems
from settings.declared import Config, T5ModelConfig
from settings.errors import UserError, refuse
from settings.fields import AUTO, counted, near_path
from settings.loading import label
from settings.program import program
from training.checkpoints.folder import Checkpoints
from training.checkpoints.runs import ADAPTER_FILES, runs_newest_first
from training.evaluation.scores import check_decisive, metric_names
from training.setup.adapter_settings import check_trained, with_form_of
from training.setup.hub import ADDRESS, MODELS_DIR, download, how_to_fetch
from training.setup.model_folders import ModelFolders, home_of, shape_of
from training.setup.resolved import ResolvedRun

MODEL_FIELDS = tuple(f.name for f in dataclasses.fields(T5ModelConfig))
# the tokenizer's, or of training alone
NOT_OF_SHAPE = ("dropout_rate", "vocab_size", "pad_token_id", "eos_token_id", "decoder_start_token_id")
# what a new model takes over of how its base answers; of the longest answer, where that is longer than what it is trained on
TAKEN = (*HEEDED, "max_new_tokens")
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def find_base(run: ResolvedRun, reads_weights: bool = True) -> None:
    """Decide which weights a run starts from, and take over its shape, tokenizer, adapters' form and way of answering.

    Args:
        reads_weights: compare the files with their checksums, which reads them once.
    Raises:
        UserError: what was named is not there, damaged, of another shape, or the adapters cannot stand on it.
    """
    metric_names(run.config)  # else unknown names would be found at the first evaluation, or never
    check_decisive(run.config, run.metrics)
    try:
        base, told = choose_base(run.config, run.resumed_dir)
    except UserError as error:  # files may be missing as well, and would be told only once this is mended
        raise UserError(*error.problems, *file_problems(run.config.data)) from None
    run.told += told
    config, is_new = run.config, run.resumed_dir is None
    if is_new:
        _refuse_to_replace_its_start(config, base)
        learns = config.train.is_finetune or config.data.objective == PREFERENCES
        if config.train.finetune_from == AUTO and learns:
            # so that a resume before the first checkpoint chooses the same
            config = config.changed(finetune_from=None if base is None else str(base.absolute()))
    if base is not None:
        if is_new and ADDRESS.fullmatch(str(config.train.finetune_from)):
            config = config.changed(finetune_from=str(base))  # as if it had been fetched before
        home = home_of(base, config)
        for place in dict.fromkeys((base, home) if is_new else (home,)):
            if reads_weights:
                refuse_damaged(place, "finetune_from")  # a checkpoint of this run was looked at before
        config = _with_shape_of(config, base, home)
        if is_new:  # found by loading it, after hours of preparing rows, otherwise
            # adapters may have more rows
            as_stored = dataclasses.replace(config.model, vocab_size=read_config(home).vocab_size)
            refuse(
                [
                    say("--finetune_from = {problem}", problem=problem)
                    for problem in misfits(TensorHeaders(home), as_stored)
                ]
            )
        if config.model.is_text:
            # where it goes on, its checkpoint alone knows how long an answer may be; what its first start has told is not repeated
            config = _with_answers_of(config, run.notes if is_new else [], home, base)
        # Resumed on another machine, it may be gone unless this start names it; the checkpoint has the same files.
        is_from_record = not is_new and config.origin("tokenizer_dir") != "flag"
        is_gone = is_from_record and not Path(config.data.tokenizer_dir).exists()
        if config.data.tokenizer_dir == AUTO or is_gone:
            has_tokens = is_adapter(base) and read_info(base).settings.tokens is not None
            config = config.changed(tokenizer_dir=str(base if has_tokens else home))
        if config.data.extra_tokens is not None:
            config = _with_extra_tokens(config, run.notes if is_new else [])
    refuse(list(ranking_problems(config)))
    run.config, run.base = with_form_of(config, base), base
    if base is not None and run.resumed_dir is not None:
        # one that was stopped before its first checkpoint begins again with the model that it goes on from
        run.is_resumed = base.parent == Checkpoints(run.resumed_dir, 1).folder
    refuse(check_trained(run.config, base))


def _with_extra_tokens(config: Config, notes: list[str]) -> Config:
    """The settings with a model that has rows for the tokens of `extra_tokens` which the tokenizer of its base lacks."""
    tokenizer, tokens = Tokenizer.load(config.data.tokenizer_dir), read_extra_tokens(str(config.data.extra_tokens))
    count = sum(tokenizer.token_to_id(token) is None for token in tokens)
    if not count:
        return config
    first, last = tokenizer.size, tokenizer.size + count - 1
    told = "{tokens} of {file} added as ids {first} to {last}; they start as the mean of their pieces"
    notes.append(say(told, tokens=counted(count, "token"), file=config.data.extra_tokens, first=first, last=last))
    if config.lora.lora_rank and config.lora.lora_tokens == AUTO:
        config = config.changed(lora_tokens=f"{first}-{last}")
    return config.changed(vocab_size=max(config.model.vocab_size, last + 1))


def choose_base(config: Config, resumed_dir: Path | None) -> tuple[Path | None, list[str]]:
    """Choose the folder whose weights a run starts from.

    Args:
        resumed_dir: of the run that goes on; its newest checkpoint is taken before all others.
    Returns:
        the folder, None for random weights; and what is to be told of a choice that the user did not make.
    Raises:
        UserError: what was named is not there, or preferences have nothing to start from.
    """
    if resumed_dir is None:
        return _first_base(config)
    latest = Checkpoints(resumed_dir, config.train.keep_latest_n_ckp).latest()
    if latest is not None:
        return latest, []
    base, why = _first_base(config)
    told = "{run} was stopped before its first checkpoint and starts again from step 1"
    return base, [say(told, run=resumed_dir.name), *why]


def _refuse_to_replace_its_start(config: Config, base: Path | None) -> None:
    """A new run that takes the place of another may not start from what goes with it."""
    replaced, tokenizer = Path(config.run.output_dir, config.run.run_name).resolve(), config.data.tokenizer_dir
    read = [] if base is None else [base, home_of(base, config)]
    read += [] if tokenizer == AUTO else [Path(tokenizer)]
    for folder in read:
        if folder.resolve().is_relative_to(replaced):
            told = "--run_name = {run}, would replace {folder}, which this run starts from; choose another run"
            raise UserError(say(told, run=config.run.run_name, folder=folder))


def _with_answers_of(config: Config, notes: list[str], *places: Path) -> Config:
    """The settings with what the base says of how it answers, where nobody says so now: the new model answers so too.

    Args:
        notes: gets what the new model does not take over. places: an adapter's base, and the adapter, whose word goes before.
    """
    taken: dict[str, Any] = {}
    for place in dict.fromkeys(places):
        found, problems = answers_by(place)
        taken |= {name: value for name, value in found.items() if name in TAKEN and not config.given(name)}
        notes += [say("{problem}; the new model does not use it", problem=problem) for problem in problems]
        notes += [say("{keys}: unknown, ignored", keys=keys) for keys in remarks(place)]
    if tokens := taken.get("split_prompts"):
        told = "prompts of more than {tokens} tokens are answered in parts, as by its base; --split_prompts=0 answers them whole"
        notes.append(say(told, tokens=tokens))
    return config.changed(**taken)


def _with_shape_of(config: Config, base: Path, home: Path) -> Config:
    """The checkpoint decides the shape; a flag that says otherwise is refused. Dropout is not part of the shape."""
    shape = shape_of(base, home)
    if config.model.is_text and not shape.is_text:
        told = "--finetune_from = {base}, is an encoder; name its head (--head=sequence or token)"
        raise UserError(say(told, base=base))
    shape = with_head_of(config, shape)
    problems = [
        say(
            "{setting} = {value}, the checkpoint {base} has a different shape ({other_value}); omit it",
            setting=label(name, config.origin(name)),
            value=getattr(config.model, name),
            base=base,
            other_value=getattr(shape, name),
        )
        for name in MODEL_FIELDS
        if config.given(name) and name != "dropout_rate" and getattr(config.model, name) != getattr(shape, name)
    ]
    refuse(problems)
    config = dataclasses.replace(config, model=dataclasses.replace(shape, dropout_rate=config.model.dropout_rate))
    refuse(check(config))  # a decoder of the checkpoint allows one head alone
    return config


def with_head_of(config: Config, shape: T5ModelConfig) -> T5ModelConfig:
    """The shape of a checkpoint with the head that the settings ask for: its own where it has such a one, as far as none is named."""
    asked = config.model
    if asked.is_text:
        return shape
    is_same = shape.head == asked.head
    names = [name for name in ("labels", "pooling", "head_kind") if config.given(name) or not is_same]
    has_decoder = asked.num_decoder_layers > 0 if config.given("num_decoder_layers") else is_same
    return dataclasses.replace(
        shape,
        head=asked.head,
        num_decoder_layers=shape.num_decoder_layers if has_decoder else 0,
        tie_word_embeddings=True,
        scale_decoder_outputs=True,
        **{name: getattr(asked, name) for name in names},
    )


def _first_base(config: Config) -> tuple[Path | None, list[str]]:
    named = config.train.finetune_from
    if named not in (AUTO, None):
        return _named_base(config, str(named)), []
    if config.data.objective == PREFERENCES:
        return _preference_base(config)
    if not config.train.is_finetune:
        return None, []
    if named is None:
        return None, [_random(say("because of --finetune_from=none"), config)]
    why_not = list[str]()
    pretrained = [run for run in runs_newest_first(config.run.output_dir) if run.is_of_text]
    for run in pretrained:
        if not run.is_finished:
            continue
        problem = _unmet_condition(config, run.folder)
        if not problem:
            return run.folder, [_taken(run.folder)]
        why_not.append(problem)
    if not why_not:
        why_not.append(say("there is no finished pretraining run in {folder}", folder=config.run.output_dir))
        unfinished = [run.model_folder for run in pretrained if run.model_folder is not None]
        if unfinished:
            why_not = [say("{run} is not finished and is used only if named explicitly", run=str(unfinished[0]))]
    return None, [_random(why_not[0], config)]


def _unmet_condition(config: Config, found: Path) -> str:
    """Why a pretraining run is not the one to go on from: a shape that the user has named, or a tokenizer that does not suit; else empty."""
    shape = with_head_of(config, read_config(found))
    # A preset that nobody named is tiny or the sample's; any other decides the shape like a flag.
    is_preset_named = config.model_preset != type(config)().model_preset
    asked = [
        name
        for name in ("model_preset", *MODEL_FIELDS)
        if (config.given(name) or (is_preset_named and config.origin(name) == "preset")) and name != "dropout_rate"
    ]
    other = [
        name
        for name in MODEL_FIELDS
        if (name not in NOT_OF_SHAPE or config.given(name)) and getattr(shape, name) != getattr(config.model, name)
    ]
    if asked and other:
        name = asked[0]
        value = config.model_preset if name == "model_preset" else getattr(config.model, name)
        return say("{model} does not match --{name}={value}", model=str(found), name=name, value=value)
    problem = ask(config, misfit, config, found)
    if not problem:
        return ""
    return say("{model} is not used unless named explicitly: {problem}", model=str(found), problem=problem)


def _others() -> str:
    return say("other starting points: --finetune_from=FOLDER (docs/finetuning.md lists checkpoints)")


def _taken(folder: Path) -> str:
    shape, settings = read_config(folder), ModelFolders(folder).run_settings
    saw_sample = settings.get("train_file", "") is None
    sample = say("; it was trained on the built-in sample only") if saw_sample else ""
    return say(
        "starting from {model}, the newest finished pretraining run ({weights} parameters, {tokens} tokens), with "
        "its architecture and tokenizer{sample}; {others}, or --finetune_from=none for random weights",
        model=str(folder),
        weights=f"{weight_counts(shape)['total']:,}",
        tokens=f"{shape.vocab_size:,}",
        sample=sample,
        others=_others(),
    )


def _random(why: str, config: Config) -> str:
    given = config.data.tokenizer_dir
    return say(
        "starting from random weights, {why}: the model ({preset}) learns from this data only, with {tokenizer}; "
        "a few thousand pairs are not enough for that. {others}",
        why=why,
        preset=config.model_preset,
        others=_others(),
        tokenizer=say("a tokenizer trained on it") if given == AUTO else given,
    )


def _named_base(config: Config, named: str) -> Path:
    folder = Path(named)
    if _holds_model(folder):
        return folder
    if named.startswith("hf://"):
        if (address := ADDRESS.fullmatch(named)) is None:
            told = "--finetune_from = {named}, is not a model on the hub; write hf://OWNER/NAME"
            raise UserError(say(told, named=named))
        name, revision = address.groups()
        kept = "--".join(name.split("/")) + (f"@{revision}" if revision else "")
        return download(name, Path(MODELS_DIR, kept), revision)
    if not folder.is_dir() and _HUB_NAME.fullmatch(named):
        fetched = Path(MODELS_DIR, folder.name)
        if config.train.allow_download:
            return download(named, fetched)
        if _holds_model(fetched):
            told = "--finetune_from = {named}, no such folder, but {fetched} is there; give that"
            raise UserError(say(told, named=named, fetched=fetched))
        if near := near_path(named):  # misspelt, and not a checkpoint of the hub
            raise UserError(say("--finetune_from = {named}, no such folder{near}", named=named, near=near))
        told = "--finetune_from = {folder}, no such folder; {how}"
        raise UserError(say(told, folder=named, how=how_to_fetch(named, fetched)))
    if folder.is_dir():
        pickled = any(folder.glob("pytorch_model*.bin"))
        convert = f"{program()} convert --model={folder} --output={folder}-plain --allow_pickle=True"
        hint = say("; turn its pytorch_model.bin into it: {command}", command=convert) if pickled else ""
        what = say("holds no {file}{hint}", file=CONFIG_FILE, hint=hint)
    else:
        what = say("is a file") if folder.exists() else say("no such folder{near}", near=near_path(folder))
    told = (
        "--finetune_from = {folder}, {what}; give a folder with config.json, model.safetensors and tokenizer.json or "
        "spiece.model, such as `hf download google/flan-t5-small --local-dir models/flan-t5-small` fetches"
    )
    raise UserError(say(told, folder=folder, what=what))


def _holds_model(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (CONFIG_FILE, ADAPTER_FILES[0]))


def _preference_base(config: Config) -> tuple[Path, list[str]]:
    folder = config.run.output_dir
    runs = runs_newest_first(folder)
    finished = [run for run in runs if run.is_finished and run.kind in ("finetune", "pretrain")]
    finished.sort(key=lambda run: run.kind != "finetune")
    if not finished:
        unfinished = [run.model_folder for run in runs if run.model_folder is not None]
        hint = ""
        if unfinished:
            hint = say(
                " ({model_folder} is not finished, and is taken only if it is named)", model_folder=unfinished[0]
            )
        raise UserError(
            "--finetune_from = {finetune_from}, there is no finished run in {folder}{hint}, and preferences need "
            "a model to continue from; give a model folder, or finetune first",
            finetune_from=config.train.finetune_from,
            folder=folder,
            hint=hint,
        )
    told = "starting from {model}, the newest finished run, which is also the reference model; {others}"
    base = finished[0].folder
    return base, [say(told, model=str(base), others=_others())]
