"""Adapters to and from folders that PEFT loads.

`adapter_config.json` says rank, scaling and targets, `adapter_model.safetensors` holds the thin matrices under the
names that PEFT gives them on transformers' T5. The file's own metadata, which PEFT does not read, holds the fingerprint
of the base: PEFT itself would put an adapter on any model of the same shape.

Source: PEFT 0.17-0.21, `LoraConfig` and `get_peft_model_state_dict`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from model.formats.adapter_folder import BASE, CONFIG_FILE, FINGERPRINT, HEAD, WEIGHTS_FILE, open_weights, read_info
from model.formats.headers import read_json
from model.formats.heads import HEAD as HEAD_TABLE
from model.formats.heads import HEAD_FIELDS, class_of
from model.formats.shape_file import EMBEDDING_COPIES, published_names
from model.formats.tensor_files import TensorFolder, write_safetensors
from model.lora.adapter import LoraAdapter, adapters_of, linears
from model.lora.form import AdapterInfo, LoraSettings
from model.lora.token_rows import TrainedTokenRows
from model.shapes import label_head_weights, targets_of, weights
from model.t5 import T5
from settings.declared import T5ModelConfig
from settings.errors import UserError
from settings.fields import counted
from support.language import join, say

_TABLE = re.compile(r"\.(shared|lm_head|embed_tokens)\.")
_PARTS = {"a": "lora_A.weight", "b": "lora_B.weight"}
_ALL = slice(None)


class _Target(NamedTuple):
    """What a tensor of an adapter's file fills: a weight, what a message calls it, and the tensor's rows that are
    meant.
    """

    weight: nn.Parameter
    name: str
    rows: slice = _ALL


def adapter_names(config: T5ModelConfig) -> dict[str, str]:
    """Path of a matrix -> PEFT's name of its adapter, behind which that of a part stands."""
    published = published_names(config)
    return {
        weight.name.removesuffix(".weight"): BASE + published[weight.name].removesuffix("weight")
        for weight in weights(config)
        if weight.is_product
    }


def _head_names(config: T5ModelConfig) -> dict[str, str]:
    """Our name -> PEFT's name of the weights of a head over labels, which learn beside the adapters."""
    return {weight.name: BASE + weight.hf_name for weight in label_head_weights(config)}


def _row_targets(config: T5ModelConfig, rows: TrainedTokenRows | None) -> dict[str, _Target]:
    """What the rows of tokens fill: PEFT knows one table of a tied embedding, and two copies of another beside the
    head.
    """
    if rows is None:
        return {}
    if rows.head is None:
        return {_row_name(published_names(config)["embedding"]): _Target(rows.embedding, "embedding")}
    targets = {_row_name(name): _Target(rows.embedding, name) for name in EMBEDDING_COPIES}
    targets[BASE + HEAD_TABLE] = _Target(rows.head, HEAD_TABLE, slice(rows.tokens[0], rows.tokens[1] + 1))
    return targets


def _row_name(table: str) -> str:
    return f"{BASE}{table.removesuffix('.weight')}.token_adapter.trainable_tokens_delta"


def _targets(
    model: T5,
    names: Mapping[str, str],
    adapters: Mapping[str, LoraAdapter],
    rows: Mapping[str, _Target],
    heads: Mapping[str, str],
) -> dict[str, _Target]:
    """What each tensor of a file of these adapters, rows of tokens and heads over labels fills, or is made of."""
    targets = {
        names[path] + _PARTS[part]: _Target(weight, f"{path}: {part}")
        for path, adapter in adapters.items()
        for part, weight in adapter.named_parameters()
    }
    return {**targets, **rows, **{name: _Target(model.get_parameter(ours), ours) for ours, name in heads.items()}}


def save_adapters(model: T5, settings: LoraSettings, folder: str | Path, base: str, fingerprint: str) -> None:
    """Write the adapters that are on, in PEFT's format.

    Args:
        base: folder of the base model. fingerprint: of its weights.
    Raises:
        OSError: the folder cannot be written.
    Memory: none; adapters on the CPU are written without a copy.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = model.config
    published = class_of(config)
    about = {
        "peft_type": "LORA",
        "task_type": published.task,
        "base_model_name_or_path": base,
        "r": settings.rank,
        "lora_alpha": settings.alpha,
        "lora_dropout": settings.dropout,
        "target_modules": list(settings.targets),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": list(published.modules_to_save) or None,
    }
    rows = model.token_rows
    row_targets = _row_targets(config, rows)
    targets = _targets(model, adapter_names(config), adapters_of(model), row_targets, _head_names(config))
    tensors = {name: target.weight.detach() for name, target in targets.items()}
    pieces: dict[str, Iterator[Tensor]] = {}
    if rows is not None:
        first, last = rows.tokens
        tokens = [*range(first, last + 1)]
        about["trainable_token_indices"] = {"shared": tokens}
        if rows.head is not None:
            about["trainable_token_indices"] = {"embed_tokens": tokens}
            # PEFT knows no other form for rows of a head of its own than the whole head, of which the base lends all
            # others.
            name = BASE + HEAD_TABLE
            tensors[name], pieces[name] = _whole_head(Path(base), first, rows.head.detach())
            about["modules_to_save"] = ["lm_head"]
    metadata = {FINGERPRINT: fingerprint}
    if not published.writes_text:
        fields = {name: getattr(config, name) for name in (*HEAD_FIELDS, "labels")}
        metadata[HEAD] = json.dumps({**fields, "has_decoder": config.num_decoder_layers > 0})
    write_safetensors(
        tensors, folder / WEIGHTS_FILE, lambda name: nullcontext(pieces.get(name, [tensors[name]])), metadata
    )
    (folder / CONFIG_FILE).write_text(json.dumps(about, indent=2) + "\n", encoding="utf8")


def _whole_head(base: Path, first: int, rows: Tensor) -> tuple[Tensor, Iterator[Tensor]]:
    """A base's head with other rows from `first` on: its shape and dtype as a tensor without content, and its
    pieces.
    """
    file = TensorFolder(base)
    dtype = next(file.chunks(HEAD_TABLE)).dtype
    count, width = file.shape(HEAD_TABLE)
    file.replace_rows(HEAD_TABLE, first, rows.to("cpu", dtype))
    whole = torch.empty(max(count, first + len(rows)), width, dtype=dtype, device="meta")
    return whole, file.chunks(HEAD_TABLE)


def load_adapters(model: T5, folder: str | Path) -> tuple[dict[str, LoraAdapter], TrainedTokenRows | None]:
    """Read the adapters of a folder for this model, and the rows of tokens beside them; they are not on yet, see
    `model.lora.adapter.use_adapters`. A head over labels that learnt beside them is filled.

    Raises:
        UserError: no adapter, or one for a model of another shape or with other modules.
    Memory: the adapters.
    """
    folder = Path(folder)
    info = read_info(folder)
    config = model.config
    names = adapter_names(config)
    heads = _head_names(config)
    rows = None if info.settings.tokens is None else TrainedTokenRows(model, info.settings.tokens)
    with open_weights(folder, "pt") as file:
        stored_names = set(file.keys())
        adapters = {
            path: LoraAdapter(linear.weight, info.settings, 0)
            for path, linear in linears(model).items()
            if names[path] + _PARTS["a"] in stored_names
        }
        if stored_names.isdisjoint(heads.values()):
            heads = {}
        targets = _targets(model, names, adapters, _row_targets(config, rows), heads)
        foreign = stored_names - targets.keys()
        _refuse_tables(folder, foreign)
        problems = [*_fill(targets, file), *_foreign(config, foreign, len(adapters))]
    if problems:
        raise UserError(
            "--adapter = {folder}, is for another base: {problems}", folder=folder, problems=join("; ", problems[:3])
        )
    if not info.fingerprint:
        _refuse_gaps(folder, info, names.values(), stored_names)
    return adapters, rows


@torch.no_grad()
def _fill(targets: Mapping[str, _Target], file: Any) -> Iterator[str]:
    """Copy each tensor into its weight, if it fits; yields what does not."""
    stored_names = set(file.keys())
    for name, (weight, label, rows) in targets.items():
        if name not in stored_names:
            yield say("{name} is missing", name=label)
            continue
        tensor = torch.atleast_1d(file.get_tensor(name))[rows]
        if tensor.shape != weight.shape:
            yield say(
                "{name} is {shape} and not {expected}",
                name=label,
                shape=list(tensor.shape),
                expected=list(weight.shape),
            )
        else:
            weight.copy_(tensor)


def _refuse_tables(folder: Path, names: Iterable[str]) -> None:
    tables = sorted(filter(_TABLE.search, names))
    if tables:
        raise UserError(
            "--adapter = {folder}, contains embedding tables that were trained or resized with it "
            "({tables}), which are not supported here; merge it with PEFT's merge_and_unload, and give the "
            "merged model",
            folder=folder,
            tables=join(", ", tables),
        )


def _foreign(config: T5ModelConfig, names: set[str], num_adapters: int) -> Iterator[str]:
    """Tensors for which this model has no module, or none for those that it has."""
    if names or not num_adapters:
        yield say(
            "holds {tensors} for modules that this model does not have{example}; it has {targets_of}",
            tensors=counted(len(names), "tensor"),
            example=say(", such as {left}", left=min(names)) if names else "",
            targets_of=join(", ", targets_of(config)),
        )


def _refuse_gaps(folder: Path, info: AdapterInfo, names: Iterable[str], stored_names: set[str]) -> None:
    """Raise where adapters lack that the folder's configuration asks for, as far as it does so by plain names alone."""
    raw = read_json(folder / CONFIG_FILE)
    if raw.get("exclude_modules") or raw.get("layers_to_transform") is not None:
        return
    # A pattern, which is one string, ends like no matrix.
    endings = tuple(f".{target}." for target in info.settings.targets)
    targeted = {name + _PARTS["a"] for name in names if name.endswith(endings)}
    lacking = targeted - stored_names
    if lacking:
        raise UserError(
            "--adapter = {folder}, lacks {tensors} of the modules that its {config_file} names, such as "
            "{lacking}; save it again, or copy it again",
            folder=folder,
            tensors=counted(len(lacking), "tensor"),
            config_file=CONFIG_FILE,
            lacking=min(lacking),
        )
