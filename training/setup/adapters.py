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

from language import join
from model.formats.adapter_folder import is_adapter, read_info
from model.formats.headers import read_json
from model.formats.peft import load_adapters
from model.formats.tensor_files import TensorFolder
from model.lora.adapter import LoraAdapter, add_adapters, use_adapters
from model.lora.form import AdapterInfo
from model.lora.freezing import freeze
from model.lora.token_rows import TokenRows
from model.t5 import T5
from settings.declared import Config
from settings.errors import UserError, refuse
from training.setup.adapter_settings import form_problems, lora_settings

FINGERPRINT_ROWS = 4
FINGERPRINT = "base_fingerprint"  # in the config.json of a model that was made from another


def fingerprint_of(folder: str | Path) -> str:
    """What tells the weights of one model folder from those of another; a folder in int8 has that of its original.

    Memory: a chunk of a tensor.
    """
    about = read_json(Path(folder) / "config.json")
    if FINGERPRINT in about:
        return str(about[FINGERPRINT])
    stored, digest = TensorFolder(Path(folder)), hashlib.blake2b(digest_size=16)
    for name in sorted(name for name in stored.names if ".block." in name):
        head = next(stored.chunks(name))[:FINGERPRINT_ROWS].to(torch.bfloat16).contiguous()
        digest.update(f"{name} {stored.shape(name)} ".encode() + head.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()


def note_origin(folder: Path, origin: str | Path) -> None:
    """Let a model folder have the fingerprint of another: adapters of that one then go over this one too."""
    path = folder / "config.json"
    values = {**read_json(path), FINGERPRINT: fingerprint_of(origin)}
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf8")


def choose_trained(model: T5, config: Config, start: Path | None = None, base: Path | None = None) -> T5:
    """Put on the adapters of a run and freeze what its settings name.

    Args:
        start: a folder with adapters to continue from; others begin at zero. base: folder of the model's own weights.
    Raises:
        UserError: settings that this model cannot follow; adapters of another base or form.
    Memory: the adapters.
    """
    settings = lora_settings(config, model.config)
    if settings is not None:
        add_adapters(model, settings, config.run.seed)
        known = fingerprint_of(base) if base is not None else ""
        if start is not None and is_adapter(start):
            refuse(form_problems(settings, start))
            _check_fingerprint(start, read_info(start), known)
            use_adapters(model, *load_adapters(model, start))
        model.adapter_info = AdapterInfo(settings, "" if base is None else str(base.resolve()), known)
    freeze(model, config.train.freeze or "")
    return model


# --- ready adapters ---


@dataclass
class AdapterSet:
    """Several adapters over one model, of which one or none is on.

    Args:
        by_name: name -> path of its matrix -> adapter; and the rows of tokens that learnt beside them.
    """

    model: T5
    by_name: dict[str, tuple[dict[str, LoraAdapter], TokenRows | None]]
    infos: dict[str, AdapterInfo]

    def set_adapter(self, name: str | None) -> None:
        """Let this adapter be on, and no other; None: the base alone.

        Raises:
            UserError: no such adapter.
        """
        if name is not None and name not in self.by_name:
            raise UserError(
                "adapter = {name}, is not loaded; there are: {by_name}", name=name, by_name=join(", ", self.by_name)
            )
        use_adapters(self.model, *(({}, None) if name is None else self.by_name[name]))
        self.model.adapter_info = None if name is None else self.infos[name]


def attach(model: T5, folders: Sequence[str | Path], base: Path | None = None) -> AdapterSet:
    """Load adapters over a model; the first is on. Each is called by the name of its folder.

    Args:
        folders: of adapters, at least one.
        base: the model's own folder, whose fingerprint must be theirs; None: not checked.
    Raises:
        UserError: no adapter, one for another base, or two of one name.
    Memory: the adapters.
    """
    names = [Path(folder).resolve().name for folder in folders]
    if len(set(names)) < len(names):
        raise UserError("--adapter = {map}, folders of one name; rename one of them", map=",".join(map(str, folders)))
    known = "" if base is None else fingerprint_of(base)
    infos = {name: read_info(folder) for name, folder in zip(names, folders, strict=True)}
    for folder, info in zip(folders, infos.values(), strict=True):
        _check_fingerprint(folder, info, known)
    loaded = {name: load_adapters(model, folder) for name, folder in zip(names, folders, strict=True)}
    adapters = AdapterSet(model, loaded, infos)
    adapters.set_adapter(names[0])
    for by_path, rows in loaded.values():
        for module in (*by_path.values(), *([] if rows is None else [rows])):
            module.requires_grad_(False)
    return adapters


def _check_fingerprint(folder: str | Path, info: AdapterInfo, known: str) -> None:
    if info.fingerprint and known and info.fingerprint != known:
        raise UserError(
            "--adapter = {folder}, is for another base ({base}): its weights are not these; give that base with "
            "--model",
            folder=folder,
            base=info.base,
        )
