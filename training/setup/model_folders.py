"""Where a trained model lies: the folder that is named, its weights, and the adapters over them. Told before torch is imported."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from data.tokenizers.published import has_tokenizer
from language import say
from model.formats.adapter_folder import is_adapter, read_info
from model.formats.shape_file import read_config
from run_files import SETTINGS_FILE
from settings.declared import Config, T5ModelConfig, settings_by_name
from settings.errors import UserError, refuse
from settings.fields import near_path, parse, read_settings_file


@dataclass(frozen=True)
class ModelFolders:
    """A trained model on the disk.

    Args:
        folder: as it is named. adapters: over it, itself where it is one; the first of them is on.
    """

    folder: Path
    adapters: tuple[Path, ...] = ()

    @classmethod
    def of(cls, folder: Path, named: str | None = None) -> ModelFolders:
        """A folder and the adapters of the setting `adapter`, in order.

        Raises:
            UserError: a folder that holds none.
        """
        words = [Path(word.strip()) for word in (named or "").split(",") if word.strip()]
        missing = [
            say("--adapter = {word}, holds no adapter_config.json; give an adapter's folder", word=word)
            if word.exists()
            else say("--adapter = {word}, no such folder; give an adapter's{hint}", word=word, hint=near_path(word))
            for word in words
            if not is_adapter(word)
        ]
        if missing:
            raise UserError(*missing)
        return cls(folder, (*([folder] if is_adapter(folder) else []), *words))

    @cached_property
    def base(self) -> Path:
        """The folder of the weights; raises UserError as `base_of`."""
        return base_of(self.folder)

    @property
    def learnt(self) -> Path:
        """Whose tokenizer, template and settings count: the adapter's that is on, or else the model's."""
        return self.adapters[0] if self.adapters else self.folder

    @property
    def all(self) -> list[Path]:
        """Every folder once, the base in front."""
        return list(dict.fromkeys((self.base, self.folder, *self.adapters)))

    @cached_property
    def shape(self) -> T5ModelConfig:
        """The shape of the model, with the head that the adapter has learnt."""
        return shape_of(self.learnt, self.base)

    @property
    def tokenizer(self) -> Path:
        """Where the tokenizer lies: beside the adapter, or with the base."""
        return self.learnt if has_tokenizer(self.learnt) else self.base

    @cached_property
    def run_settings(self) -> Path | None:
        """The settings of the run that it comes from.

        Raises:
            UserError: a value is none that its setting takes. Names that are no settings, as of another version, are passed over.
        """
        paths = (folder / SETTINGS_FILE for folder in (self.learnt, *self.learnt.parents[:2]))
        path = next((path for path in paths if path.is_file()), None)
        if path is not None:
            refuse(_wrong_values(path))
        return path


def _wrong_values(path: Path) -> list[str]:
    problems: list[str] = []
    for name, value in read_settings_file(path).items():
        if name not in settings_by_name():
            continue
        try:
            if isinstance(value, (dict, list)):
                raise ValueError(say("is a table; a setting takes one value"))
            parse(settings_by_name()[name][1], value)
        except ValueError as error:
            text = "{path}: {name} = {value}, {problem}; correct or remove the line"
            problems.append(say(text, path=path, name=name, value=str(value)[:60], problem=error))
    return problems


def home_of(folder: Path, config: Config) -> Path:
    """The model folder of what a run starts from; a flag `finetune_from` says where the base of an adapter lies now."""
    return base_of(folder, config.train.finetune_from if config.origin("finetune_from") == "flag" else None)


def base_of(folder: str | Path, instead: str | None = None) -> Path:
    """The model folder behind a folder: itself, or the base of the adapter in it.

    Args:
        instead: where the base lies now, if it has moved; only heeded for adapters, and where it is none.
    Raises:
        UserError: the base is not there.
    """
    if not is_adapter(folder):
        return Path(folder)
    base = Path(instead if instead and not is_adapter(instead) else read_info(folder).base)
    if is_adapter(base):
        raise UserError(
            "{folder}, is an adapter for {base}, which is an adapter as well; merge that one first",
            folder=folder,
            base=base,
        )
    if not (base / "config.json").is_file():
        raise UserError(
            "{folder}, is an adapter for {base}, which is not there; put it back, or name where it is with "
            "--model (train, dpo: --finetune_from)",
            folder=folder,
            base=base,
        )
    return base


def shape_of(folder: Path, home: Path) -> T5ModelConfig:
    """The shape of a model's folder; of an adapter's that of its base in `home`, with the head that was learnt beside it."""
    shape = read_config(home)
    return read_info(folder).adapted(shape) if is_adapter(folder) else shape
