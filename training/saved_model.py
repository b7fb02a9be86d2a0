"""`SavedModel.read(folder)`: what is known of a trained model from its folder, without importing torch.

The folder may be a run, one of its checkpoints, a folder in Hugging Face's format, or an adapter with its base
elsewhere. An adapted model has the shape of the base, with the head of the adapter if one was trained with it. For
everything else the adapter's folder comes first, and the base fills in what it lacks.

Shape and label names are fixed: other values from the user are refused (`shape_conflicts`). Answer settings, the form
of the adapter, and the lengths and columns of the training rows are defaults: `Config.with_saved` uses them where the
user chose nothing, and `saved_note` lists them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from data.tokenizers.published import has_tokenizer
from model.formats.adapter_folder import is_adapter, read_info
from model.formats.answering import (
    DECODING_SETTINGS,
    SAMPLING_DEFAULTS,
    SEARCH_SETTINGS,
    answer_list_of,
    read_answer_settings,
    unknown_keys,
)
from model.formats.sentence_transformers import TextSettings, encoder_folder, text_settings
from model.formats.shape_file import read_config
from model.lora.form import LoraSettings
from settings.declared import Config, T5ModelConfig, settings_by_name
from settings.errors import UserError, refuse
from settings.fields import AUTO, near_path, parse, read_settings_file
from settings.precedence import BY_USER, SAVED
from settings.tasks import MODEL_HEADS
from support.language import join, say
from training.checkpoints.runs import model_folder, runs_newest_first
from training.report.run_files import SETTINGS_FILE

SHAPE_SETTINGS = tuple(member.name for member in fields(T5ModelConfig) if member.name != "dropout_rate")
# These follow from the tokenizer, so a preset may differ in them and still have the same shape.
TOKENIZER_SETTINGS = ("vocab_size", "pad_token_id", "eos_token_id", "decoder_start_token_id")
HEAD_SETTINGS = ("labels", "pooling", "head_kind", "embedding_size", "normalize", "num_decoder_layers")
# How a model that gives vectors reads texts, which models that are trained from it do as well.
READING_SETTINGS = tuple(member.name for member in fields(TextSettings))
# Answer settings that a model inherits from the model it is trained from.
INHERITED_ANSWERS = (*DECODING_SETTINGS, "max_new_tokens")
# Groups that only training steps depend on: a saved value that this version does not accept is ignored there.
STEP_GROUPS = ("train", "preference", "lora", "memory")


@dataclass(frozen=True)
class SavedModel:
    """A trained model on disk. Make one with `SavedModel.read`.

    Args:
        folder: the folder that the user names, of a whole model or an adapter.
        adapters: all adapters for the base, with `folder` in front if it is one; the first is active.
        moved_base: the base's folder, if it is not where the adapter's file says.
    """

    folder: Path
    adapters: tuple[Path, ...] = ()
    moved_base: str | None = None

    @classmethod
    def read(cls, folder: str | Path | None, adapters: str | None = None, moved_base: str | None = None) -> SavedModel:
        """The model in a folder, with further adapters. Files are read on first use.

        Args:
            folder: None: the base of the first adapter.
            adapters: folders separated by commas, as in the setting `adapter`.
            moved_base: as in the class.
        Raises:
            UserError: a folder in `adapters` is not an adapter.
        """
        adapter_paths = [Path(word.strip()) for word in (adapters or "").split(",") if word.strip()]
        refuse([_not_an_adapter(path) for path in adapter_paths if not is_adapter(path)])
        folder = cls(adapter_paths[0]).base if folder is None else encoder_folder(Path(folder))
        if is_adapter(folder):
            adapter_paths.insert(0, folder)
        return cls(folder, tuple(adapter_paths), moved_base)

    @cached_property
    def base(self) -> Path:
        """The folder of the whole model: `folder` itself, or the base of that adapter.

        Raises:
            UserError: the base is missing, or is an adapter as well.
        """
        if not is_adapter(self.folder):
            return self.folder
        base = Path(read_info(self.folder).base)
        if self.moved_base is not None and not is_adapter(self.moved_base):
            base = Path(self.moved_base)
        base = encoder_folder(base)
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
        """The folder that was trained last: the active adapter, else the whole model."""
        return self.adapters[0] if self.adapters else self.folder

    @property
    def layers(self) -> list[Path]:
        """The base, then `top` if that is another folder; values in `top` override those in the base."""
        return list(dict.fromkeys((self.base, self.top)))

    @property
    def folders(self) -> list[Path]:
        """Every folder once, the base first."""
        return list(dict.fromkeys((self.base, self.folder, *self.adapters)))

    @cached_property
    def shape(self) -> T5ModelConfig:
        """The shape of the base, with the head and the added tokens of the active adapter."""
        shape = read_config(self.base)
        return read_info(self.top).adapted(shape) if self.adapters else shape

    @property
    def has_head_of_base(self) -> bool:
        """Whether the head is that of the base: the active adapter, if there is one, has none of its own."""
        return not (self.adapters and read_info(self.top).head)

    @property
    def tokenizer(self) -> Path:
        """The folder with the tokenizer: the active adapter if it has one, else the base."""
        return self.top if has_tokenizer(self.top) else self.base

    @property
    def answer_list(self) -> Path | None:
        """The file with the only possible answers, the adapter's before the base's; None: any text is possible."""
        return answer_list_of(*reversed(self.layers))

    @property
    def unknown_key_notes(self) -> list[str]:
        """A note for each published file that has unknown keys, naming them."""
        return [say("{keys}: unknown, ignored", keys=keys) for folder in self.layers for keys in unknown_keys(folder)]

    @cached_property
    def run_settings(self) -> dict[str, Any]:
        """Settings of the run that trained the model, without those that this version does not have.

        If no file of a run is found: those of a folder of sentence-transformers; of another folder none.

        Raises:
            UserError: a setting that rows or answers depend on has an invalid value.
        """
        # A checkpoint is two folders below its run: <run>/checkpoints/<step>.
        paths = (folder / SETTINGS_FILE for folder in (self.top, *self.top.parents[:2]))
        path = next(filter(Path.is_file, paths), None)
        return text_settings(self.base) if path is None else _read_settings(path)

    def settings_of(self, *names: str) -> dict[str, Any]:
        """The values of these settings in `run_settings`, where they are there."""
        return {name: self.run_settings[name] for name in names if name in self.run_settings}

    @property
    def adapter_form(self) -> dict[str, Any]:
        """Settings for a run that continues training the active adapter: its form without the rank.

        Empty for a whole model.
        """
        if not self.adapters:
            return {}
        form = form_settings(read_info(self.top).settings)
        del form["lora_rank"]
        return form

    def answer_settings(self, config: Config, searches: bool = True) -> tuple[dict[str, Any], list[str]]:
        """Settings for decoding that the model's folders publish, and the problems with those that cannot be used.

        Settings that the user or a named preset has chosen are left out. With beam search, those for sampling are left
        out too, and with sampling, those for beam search.

        Args:
            config: the settings of the command.
            searches: whether the command can do beam search.
        """
        generate = config.generate
        overruled = {name for name, _ in config.origins if config.overrides_saved_model(name)}
        samples = generate.temperature > 0.0
        is_greedy_by_choice = "temperature" in overruled and not samples
        if generate.num_beams > 1 or is_greedy_by_choice:
            overruled.update(SAMPLING_DEFAULTS)
        if samples or not searches:
            overruled.update(SEARCH_SETTINGS)
        if config.answer.num_answers > 1:
            overruled.add("split_prompts")  # Split prompts have one answer: those of their parts, joined.
        settings: dict[str, Any] = {}
        problems: list[str] = []
        for folder in self.layers:
            published, folder_problems = read_answer_settings(folder, overruled)
            settings |= published
            problems += folder_problems
        return settings, problems

    def shape_for(self, model: T5ModelConfig, is_set: Callable[[str], bool]) -> T5ModelConfig:
        """The model's shape with the head that the settings ask for; arguments as in `with_head`.

        Raises:
            UserError: the settings ask for a head that writes text, and the model is an encoder.
        """
        if MODEL_HEADS[model.head].writes_text and not MODEL_HEADS[self.shape.head].writes_text:
            trained = [name for name, facts in MODEL_HEADS.items() if facts.task and not facts.writes_text]
            heads = [self.shape.head] if self.shape.head in trained else trained
            raise UserError(
                "--finetune_from = {base}, is an encoder; name its head (--head={heads})",
                base=self.folder,
                heads=join(say(" or "), heads),
            )
        return with_head(self.shape, model, is_set)

    def shape_conflicts(self, model: T5ModelConfig, origin: Callable[[str], str | None]) -> list[str]:
        """Settings of the shape for which the user, or a preset that the user names, asks for another value.

        Args:
            model: the settings of the command.
            origin: where each of them came from, as `Config.origin`.
        """
        shape = self.shape_for(model, lambda name: origin(name) in BY_USER)
        different = [name for name in SHAPE_SETTINGS if getattr(shape, name) != getattr(model, name)]
        of_preset = [name for name in different if origin(name) == "preset" and name not in TOKENIZER_SETTINGS]
        return [name for name in different if origin(name) in BY_USER or name in of_preset]


def find_model(config: Config) -> SavedModel:
    """The model of the settings `model` and `adapter`.

    With model = auto, this is the base of the adapter that is named, else the model of the newest run.

    Raises:
        UserError: there is no such model.
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


def with_head(shape: T5ModelConfig, model: T5ModelConfig, is_set: Callable[[str], bool]) -> T5ModelConfig:
    """A shape with the head that the settings ask for.

    What the user does not give of the head stays as in `shape` if that has the same kind of head.

    Args:
        shape: of the saved model.
        model: the settings of the command.
        is_set: `Config.is_set`: whether the user set the setting of this name.
    """
    if MODEL_HEADS[model.head].writes_text:
        return shape
    defaults = shape if shape.head == model.head else model
    head = {name: getattr(model if is_set(name) else defaults, name) for name in HEAD_SETTINGS}
    # The settings only say whether the decoder stays; its depth is that of the saved weights.
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
    """The settings that make an adapter of this form."""
    return {
        "lora_rank": form.rank,
        "lora_alpha": form.alpha,
        "lora_targets": ",".join(form.targets),
        "lora_tokens": None if form.tokens is None else "{}-{}".format(*form.tokens),
    }


def saved_note(values: Mapping[str, Any], origin: Callable[[str], str | None]) -> list[str]:
    """One line that lists the settings which a saved model has changed from their defaults; empty if there are none.

    Args:
        values: all settings by name.
        origin: where each of them came from, as `Config.origin`.
    """
    flags = [
        f"--{name}={values[name]}"
        for name, (_, member) in settings_by_name().items()
        if origin(name) == SAVED and values[name] != member.default
    ]
    if not flags:
        return []
    return [say("from the model's folder: {settings}; flags override them", settings=", ".join(flags))]


def _not_an_adapter(path: Path) -> str:
    if path.exists():
        return say("--adapter = {word}, holds no adapter_config.json; give an adapter's folder", word=path)
    return say("--adapter = {word}, no such folder; give an adapter's{hint}", word=path, hint=near_path(path))


def _read_settings(path: Path) -> dict[str, Any]:
    """The settings in a run's file that this version has.

    Raises:
        UserError: a setting outside of `STEP_GROUPS` has an invalid value.
    """
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
            if group not in STEP_GROUPS:
                text = "{path}: {name} = {value}, {problem}; correct or remove the line"
                problems.append(say(text, path=path, name=name, value=str(value)[:60], problem=error))
    refuse(problems)
    return settings
