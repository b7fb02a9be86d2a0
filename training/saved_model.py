"""`SavedModel.read(folder)`: what the folder of a trained model says of it, before torch is imported.

It may be a run, one of its checkpoints, a folder published for Hugging Face, or an adapter, whose base lies elsewhere.
Of adapter and base, the shape is the base's, but for the head that was trained beside the adapter; all else is the
adapter's where it says so.

Shape and names of labels are conditions: what the user names otherwise is refused (`shape_conflicts`). Settings of
answers, the form of an adapter, and lengths and columns of the rows it was trained on are a layer: `Config.with_saved`
takes them where the user has named nothing, and `saved_note` says so in one line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from common.language import say
from data.tokenizers.published import has_tokenizer
from model.formats.adapter_folder import is_adapter, read_info
from model.formats.answering import (
    DRAWN,
    HEEDED,
    SEARCH,
    answer_list_of,
    answers_by,
    remarks,
)
from model.formats.shape_file import read_config
from model.lora.form import LoraSettings
from settings.declared import Config, T5ModelConfig, settings_by_name
from settings.errors import UserError, refuse
from settings.fields import AUTO, near_path, parse, read_settings_file
from settings.precedence import SAVED
from settings.tasks import MODEL_HEADS
from training.checkpoints.runs import model_folder, runs_newest_first
from training.report.run_files import SETTINGS_FILE

SHAPE_SETTINGS = tuple(member.name for member in fields(T5ModelConfig) if member.name != "dropout_rate")
# These follow from the tokenizer, so that a preset of another vocabulary is no other shape.
TOKENIZER_SETTINGS = ("vocab_size", "pad_token_id", "eos_token_id", "decoder_start_token_id")
# Origins of what the user has chosen, setting by setting:
GIVEN = ("flag", "file", "edited")
HEAD_SETTINGS = ("labels", "pooling", "head_kind", "num_decoder_layers")
# Of how its base answers, what a model that is trained on from it takes over.
INHERITED_ANSWERS = (*HEEDED, "max_new_tokens")
# Neither rows nor answers depend on these groups, of which another version may have had other values.
GROUPS_OF_STEPS = ("train", "preference", "lora", "memory")


@dataclass(frozen=True)
class SavedModel:
    """A trained model on the disk. Make one with `SavedModel.read`.

    Args:
        folder: as the user names it.
        adapters: over its weights, itself where it is one; the first of them is on.
        moved_base: where the base of an adapter lies now; None: where the adapter says.
    """

    folder: Path
    adapters: tuple[Path, ...] = ()
    moved_base: str | None = None

    @classmethod
    def read(cls, folder: str | Path | None, adapters: str | None = None, moved_base: str | None = None) -> SavedModel:
        """A folder, and the adapters of the setting `adapter`, in order. The files are read when they are asked for.

        Args:
            folder: None: the base of the first adapter.
        Raises:
            UserError: a folder of `adapters` holds none.
        """
        further = [Path(word.strip()) for word in (adapters or "").split(",") if word.strip()]
        refuse([_no_adapter(path) for path in further if not is_adapter(path)])
        folder = cls(further[0]).base if folder is None else Path(folder)
        own = [folder] if is_adapter(folder) else []
        return cls(folder, (*own, *further), moved_base)

    @cached_property
    def base(self) -> Path:
        """The folder of the weights.

        Raises:
            UserError: the base of the adapter is not there, or is an adapter as well.
        """
        if not is_adapter(self.folder):
            return self.folder
        base = Path(read_info(self.folder).base)
        if self.moved_base is not None and not is_adapter(self.moved_base):
            base = Path(self.moved_base)
        if is_adapter(base):
            raise UserError(
                "{folder}, is an adapter for {base}, which is an adapter as well; merge that one first",
                folder=self.folder,
                base=base,
            )
        if not (base / "config.json").is_file():
            raise UserError(
                "{folder}, is an adapter for {base}, which is not there; put it back, or name where it is with "
                "--model (train, dpo: --finetune_from)",
                folder=self.folder,
                base=base,
            )
        return base

    @property
    def top(self) -> Path:
        """The folder that was trained last: of the adapter that is on, else the model's own."""
        return self.adapters[0] if self.adapters else self.folder

    @property
    def layers(self) -> list[Path]:
        """Base and top, or the one folder that is both; what a later one says goes before an earlier one."""
        return list(dict.fromkeys((self.base, self.top)))

    @property
    def folders(self) -> list[Path]:
        """Every folder once, the base in front."""
        return list(dict.fromkeys((self.base, self.folder, *self.adapters)))

    @cached_property
    def shape(self) -> T5ModelConfig:
        """The shape of the model, with the head that was trained beside the adapter that is on."""
        shape = read_config(self.base)
        return read_info(self.top).adapted(shape) if self.adapters else shape

    @property
    def tokenizer(self) -> Path:
        """The folder of the tokenizer: beside the adapter, else with the base."""
        return self.top if has_tokenizer(self.top) else self.base

    @property
    def answer_list(self) -> Path | None:
        """The file of the list that its answers come from; None: they come from none."""
        return answer_list_of(*reversed(self.layers))

    @property
    def unknown_key_notes(self) -> list[str]:
        """File by file, which published keys nobody here knows."""
        return [say("{keys}: unknown, ignored", keys=keys) for folder in self.layers for keys in remarks(folder)]

    @cached_property
    def run_settings(self) -> dict[str, Any]:
        """Settings of the run that trained the model, as far as this version has them; empty where there is no run.

        Raises:
            UserError: a setting that rows or answers depend on has a value that it cannot have.
        """
        paths = (folder / SETTINGS_FILE for folder in (self.top, *self.top.parents[:2]))
        path = next(filter(Path.is_file, paths), None)
        return {} if path is None else _read_settings(path)

    def settings_of(self, *names: str) -> dict[str, Any]:
        """Those of these settings that the run which trained the model has."""
        return {name: self.run_settings[name] for name in names if name in self.run_settings}

    @property
    def adapter_form(self) -> dict[str, Any]:
        """The form of the adapter but for its rank, as settings that a run which goes on with it takes over; of a whole
        model none.
        """
        if not self.adapters:
            return {}
        form = form_settings(read_info(self.top).settings)
        del form["lora_rank"]
        return form

    def answer_settings(self, config: Config, searches: bool = True) -> tuple[dict[str, Any], list[str]]:
        """How it answers, as settings, and what it says that cannot be done.

        Where the user asks for a search, what it says of drawing tokens is passed over, and the other way round.

        Args:
            config: what the user has named in it is not looked at here.
            searches: whether there is a beam search where it answers.
        """
        generate = config.generate
        overruled = {name for name, _ in config.origins if config.named(name)}
        draws = generate.temperature > 0.0
        if generate.num_beams > 1 or ("temperature" in overruled and not draws):
            overruled.update(DRAWN)
        if draws or not searches:
            overruled.update(SEARCH)
        if config.answer.num_answers > 1:
            overruled.add("split_prompts")  # It joins one answer of each part.
        settings: dict[str, Any] = {}
        problems: list[str] = []
        for folder in self.layers:
            published, wrong = answers_by(folder, overruled)
            settings |= published
            problems += wrong
        return settings, problems

    def shape_for(self, model: T5ModelConfig, is_given: Callable[[str], bool]) -> T5ModelConfig:
        """Its shape, with the head that the user asks for; arguments as of `with_head`.

        Raises:
            UserError: text is asked for, and it is an encoder.
        """
        if MODEL_HEADS[model.head].writes_text and not MODEL_HEADS[self.shape.head].writes_text:
            raise UserError(
                "--finetune_from = {base}, is an encoder; name its head (--head=sequence or token)", base=self.folder
            )
        return with_head(self.shape, model, is_given)

    def shape_conflicts(self, model: T5ModelConfig, origin: Callable[[str], str | None]) -> list[str]:
        """The settings of its shape that the user has chosen otherwise, or a preset that the user has named.

        Args:
            model: the settings. origin: where each is from, as `Config.origin`.
        """
        shape = self.shape_for(model, lambda name: origin(name) in GIVEN)
        different = [name for name in SHAPE_SETTINGS if getattr(shape, name) != getattr(model, name)]
        # A preset of another vocabulary is no other shape.
        of_preset = [name for name in different if origin(name) == "preset" and name not in TOKENIZER_SETTINGS]
        return [name for name in different if origin(name) in GIVEN or name in of_preset]


def find_model(config: Config) -> SavedModel:
    """The model that `--model` names, with its adapters; auto: the base of the adapter that is named, else the newest
    run's model.

    Raises:
        UserError: it is not there.
    """
    name: str | None = config.checkpoint.model
    adapter = config.checkpoint.adapter
    if name == AUTO and adapter is not None:
        return SavedModel.read(None, adapter)
    if name == AUTO:
        name = next((str(run.folder) for run in runs_newest_first(config.run.output_dir) if run.model_folder), None)
    if name is None:
        raise UserError(
            "--model = auto, there is no trained model in {output_dir}; give a folder, or train first",
            output_dir=config.run.output_dir,
        )
    folder = model_folder(name) or Path(name)
    if folder.is_file():
        raise UserError(
            "--model = {folder}, is a file; give the folder with config.json, model.safetensors and tokenizer.json",
            folder=name,
        )
    if not folder.is_dir():
        missing = say(
            "--model = {folder}, no such folder; give one with config.json, model.safetensors and tokenizer.json",
            folder=name,
        )
        raise UserError(missing + near_path(folder))
    return SavedModel.read(folder, adapter)


def with_head(shape: T5ModelConfig, model: T5ModelConfig, is_given: Callable[[str], bool]) -> T5ModelConfig:
    """A shape with the head that the settings ask for: its own where it has such a one, as far as none is named.

    Args:
        model: the settings. is_given: whether the user has named one of them.
    """
    if MODEL_HEADS[model.head].writes_text:
        return shape
    own = shape if shape.head == model.head else model
    head = {name: getattr(model if is_given(name) else own, name) for name in HEAD_SETTINGS}
    num_decoder_layers = shape.num_decoder_layers if head.pop("num_decoder_layers") else 0
    return replace(
        shape,
        head=model.head,
        num_decoder_layers=num_decoder_layers,
        tie_word_embeddings=True,
        scale_decoder_outputs=True,
        **head,
    )


def form_settings(form: LoraSettings) -> dict[str, Any]:
    """The form of an adapter as the settings that make it."""
    return {
        "lora_rank": form.rank,
        "lora_alpha": form.alpha,
        "lora_targets": ",".join(form.targets),
        "lora_tokens": None if form.tokens is None else "{}-{}".format(*form.tokens),
    }


def saved_note(values: Mapping[str, Any], origin: Callable[[str], str | None]) -> list[str]:
    """In one line, which settings are not as by default because a saved model says so; no line where none is.

    Args:
        values: all settings. origin: where each is from, as `Config.origin`.
    """
    flags = [
        f"--{name}={values[name]}"
        for name, (_, member) in settings_by_name().items()
        if origin(name) == SAVED and values[name] != member.default
    ]
    if not flags:
        return []
    return [say("as the model's folder says: {settings}; flags override it", settings=", ".join(flags))]


def _no_adapter(path: Path) -> str:
    if path.exists():
        return say("--adapter = {word}, holds no adapter_config.json; give an adapter's folder", word=path)
    return say("--adapter = {word}, no such folder; give an adapter's{hint}", word=path, hint=near_path(path))


def _read_settings(path: Path) -> dict[str, Any]:
    """The settings of a run's file that this version has."""
    settings: dict[str, Any] = {}
    problems: list[str] = []
    saved = read_settings_file(path)
    for name, (group, member) in settings_by_name().items():
        if name not in saved:
            continue
        value = saved[name]
        try:
            if isinstance(value, (dict, list)):
                raise ValueError(say("is a table; a setting takes one value"))
            settings[name] = parse(member, value)
        except ValueError as error:
            if group not in GROUPS_OF_STEPS:
                text = "{path}: {name} = {value}, {problem}; correct or remove the line"
                problems.append(say(text, path=path, name=name, value=str(value)[:60], problem=error))
    refuse(problems)
    return settings
