"""Weights to train beside a frozen base: the training side of `model.lora.adapter`.

An adapter's folder names its base and the base's fingerprint: an adapter on other weights of the same shape would load
and write nonsense, so it is refused. The fingerprint is of the first rows of the blocks' matrices, rounded to bf16: it
takes no time, and files, shards and dtypes do not change it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from model.formats.adapter_folder import is_adapter, read_info
from model.formats.headers import read_json
from model.formats.peft import load_adapters
from model.formats.tensor_files import TensorFolder
from model.lora.adapter import LoraAdapter, add_adapters, use_adapters
from model.lora.form import AdapterInfo
from model.lora.freezing import freeze
from model.lora.token_rows import TrainedTokenRows
from model.t5 import T5
from settings.declared import LoraConfig
from settings.errors import UserError, refuse
from support.language import join
from training.setup.adapter_settings import form_problems, lora_settings

FINGERPRINT_ROWS = 4
FINGERPRINT = "base_fingerprint"  # The key in the config.json of a model that was made from another.


def fingerprint_of(folder: str | Path) -> str:
    """What tells the weights of one model folder from those of another; a folder in int8 has that of its original.

    Memory: a chunk of a tensor.
    """
    about = read_json(Path(folder) / "config.json")
    if FINGERPRINT in about:
        return str(about[FINGERPRINT])
    tensors = TensorFolder(Path(folder))
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(name for name in tensors.names if ".block." in name):
        head = next(tensors.chunks(name))[:FINGERPRINT_ROWS].to(torch.bfloat16).contiguous()
        digest.update(f"{name} {tensors.shape(name)} ".encode() + head.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()


def note_origin(folder: Path, origin: str | Path) -> None:
    """Let a model folder have the fingerprint of another: adapters of that one then go over this one too."""
    path = folder / "config.json"
    values = {**read_json(path), FINGERPRINT: fingerprint_of(origin)}
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf8")


def choose_trained(
    model: T5,
    lora: LoraConfig,
    freeze_words: str | None,
    seed: int,
    start: Path | None = None,
    base: Path | None = None,
) -> T5:
    """Put on the adapters of a run and freeze what its settings name.

    Args:
        freeze_words: the setting `freeze`.
        start: a folder with adapters to continue from; others begin at zero. base: folder of the model's own weights.
    Raises:
        UserError: settings that this model cannot follow; adapters of another base or form.
    Memory: the adapters.
    """
    settings = lora_settings(lora, model.config)
    if settings is not None:
        add_adapters(model, settings, seed)
        info = AdapterInfo(settings, "", "")
        if base is not None:
            info = AdapterInfo(settings, str(base.resolve()), fingerprint_of(base))
        if start is not None and is_adapter(start):
            refuse(form_problems(settings, start))
            _check_fingerprint(start, read_info(start), info.fingerprint)
            use_adapters(model, *load_adapters(model, start))
        model.adapter_info = info
    freeze(model, freeze_words or "")
    return model


# --- ready adapters ---


@dataclass
class AdapterSet:
    """Several adapters over one model, of which one or none is on.

    Args:
        by_name: name -> path of its matrix -> adapter; and the rows of tokens that learnt beside them.
    """

    model: T5
    by_name: dict[str, tuple[dict[str, LoraAdapter], TrainedTokenRows | None]]
    infos: dict[str, AdapterInfo]

    def set_adapter(self, name: str | None) -> None:
        """Let this adapter be on, and no other; None: the base alone.

        Raises:
            UserError: no such adapter.
        """
        if name is None:
            use_adapters(self.model, {}, None)
            self.model.adapter_info = None
            return
        if name not in self.by_name:
            raise UserError(
                "adapter = {name}, is not loaded; there are: {by_name}", name=name, by_name=join(", ", self.by_name)
            )
        use_adapters(self.model, *self.by_name[name])
        self.model.adapter_info = self.infos[name]


def attach(model: T5, folders: Sequence[str | Path], base: Path | None = None) -> AdapterSet:
    """Load adapters over a model; the first is on. Each is called by the name of its folder.

    Args:
        folders: of adapters, at least one.
        base: the model's own folder, whose fingerprint must be theirs; None: not checked.
    Raises:
        UserError: no adapter, one for another base, or two of one name.
    Memory: the adapters.
    """
    fingerprint = "" if base is None else fingerprint_of(base)
    adapters = AdapterSet(model, {}, {})
    for folder in folders:
        name = Path(folder).resolve().name
        if name in adapters.by_name:
            text = "--adapter = {map}, folders of one name; rename one of them"
            raise UserError(text, map=",".join(map(str, folders)))
        info = read_info(folder)
        _check_fingerprint(folder, info, fingerprint)
        by_path, rows = load_adapters(model, folder)
        for module in filter(None, (*by_path.values(), rows)):
            module.requires_grad_(False)
        adapters.by_name[name] = by_path, rows
        adapters.infos[name] = info
    adapters.set_adapter(next(iter(adapters.by_name)))
    return adapters


def _check_fingerprint(folder: str | Path, info: AdapterInfo, fingerprint: str) -> None:
    if info.fingerprint and fingerprint and info.fingerprint != fingerprint:
        raise UserError(
            "--adapter = {folder}, is for another base ({base}): its weights are not these; give that base with "
            "--model",
            folder=folder,
            base=info.base,
        )
