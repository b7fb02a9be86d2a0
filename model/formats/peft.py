"""Adapters to and from folders that PEFT loads.

`adapter_config.json` says rank, scaling and targets, `adapter_model.safetensors` holds the thin matrices under the names
that PEFT gives them on transformers' T5. The file's own metadata, which PEFT does not read, holds the fingerprint of the
base: PEFT itself would put an adapter on any model of the same shape.

Source: PEFT 0.17-0.21, `LoraConfig` and `get_peft_model_state_dict`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from language import join, say
from model.formats.adapter_folder import CONFIG_FILE, FINGERPRINT, HEAD, WEIGHTS_FILE, open_weights, read_info
from model.formats.headers import read_json
from model.formats.shape_file import HEAD as HEAD_TABLE
from model.formats.shape_file import class_of, published_names
from model.formats.tensor_files import TensorFolder, write_safetensors
from model.lora.adapter import LoraAdapter, adapters_of, linears
from model.lora.form import LoraSettings
from model.lora.token_rows import TokenRows
from model.shapes import label_head_weights, targets_of, weights
from model.t5 import T5
from settings.declared import T5ModelConfig
from settings.errors import UserError
from settings.fields import counted

_TABLE = re.compile(r"\.(shared|lm_head|embed_tokens)\.")
TASKS = {  # class of transformers -> what PEFT calls its task
    "ForConditionalGeneration": "SEQ_2_SEQ_LM", "EncoderModel": "FEATURE_EXTRACTION", "ForTokenClassification": "TOKEN_CLS",
    "ForSequenceClassification": "SEQ_CLS",
}  # fmt: skip
_BASE = "base_model.model."
_PARTS = {"a": "lora_A.weight", "b": "lora_B.weight"}


def peft_names(config: T5ModelConfig) -> dict[str, dict[str, str]]:
    """Path of a matrix -> PEFT's name of each part (a and b) of its adapter."""
    published = published_names(config)
    return {
        weight.name.removesuffix(".weight"): {
            part: f"{_BASE}{published[weight.name].removesuffix('.weight')}.{name}" for part, name in _PARTS.items()
        }
        for weight in weights(config)
        if weight.is_product
    }


def _head_names(config: T5ModelConfig) -> dict[str, str]:
    """Our name -> PEFT's name of the weights of a head over labels, which learn beside the adapters."""
    return {weight.name: _BASE + weight.hf_name for weight in label_head_weights(config)}


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
    names = peft_names(model.config)
    tensors = {
        names[path][part]: weight.detach()
        for path, adapter in adapters_of(model).items()
        for part, weight in adapter.named_parameters()
    }
    tensors |= {name: model.get_parameter(ours).detach() for ours, name in _head_names(model.config).items()}
    whole: dict[str, Iterator[Tensor]] = {}
    if (rows := model.token_rows) is not None:
        tensors |= dict.fromkeys(_row_names(model.config), rows.embedding.detach())
        if rows.head is not None:  # PEFT knows no other form for rows of a head of its own; the base lends all others
            stored, name = TensorFolder(Path(base)), _BASE + HEAD_TABLE
            dtype = stored.dtype(HEAD_TABLE) if stored.dtype(HEAD_TABLE).is_floating_point else torch.float32
            stored.replace_rows(HEAD_TABLE, rows.tokens[0], rows.head.detach().to("cpu", dtype))
            tensors[name] = torch.empty(stored.shape(HEAD_TABLE), dtype=dtype, device="meta")
            whole[name] = (chunk.to(dtype) for chunk in stored.chunks(HEAD_TABLE))
    metadata, task = {FINGERPRINT: fingerprint}, TASKS[class_of(model.config)]
    if not model.config.is_text:
        fields = {name: getattr(model.config, name) for name in ("head", "labels", "pooling", "head_kind")}
        metadata[HEAD] = json.dumps({**fields, "has_decoder": model.config.num_decoder_layers > 0})
    write_safetensors(
        tensors, folder / WEIGHTS_FILE, lambda name: nullcontext(whole.get(name, tensors[name])), metadata
    )
    # transformers has a module of its own for some heads; PEFT leaves out the tensors of others
    modules = {"TOKEN_CLS": ["classifier"], "SEQ_CLS": ["classification_head"]}.get(task)
    if whole:
        modules = ["lm_head"]
    about = {
        "peft_type": "LORA", "task_type": task, "base_model_name_or_path": base, "r": settings.rank,
        "lora_alpha": settings.alpha, "lora_dropout": settings.dropout, "target_modules": list(settings.targets),
        "bias": "none", "fan_in_fan_out": False,
        "inference_mode": True, "init_lora_weights": True, "modules_to_save": modules,
    }  # fmt: skip
    if rows is not None:
        first, last = rows.tokens
        table = "shared" if model.head is None else "embed_tokens"
        about["trainable_token_indices"] = {table: [*range(first, last + 1)]}
    (folder / CONFIG_FILE).write_text(json.dumps(about, indent=2) + "\n", encoding="utf8")


def load_adapters(model: T5, folder: str | Path) -> tuple[dict[str, LoraAdapter], TokenRows | None]:
    """Read the adapters of a folder for this model, and the rows of tokens beside them; they are not on yet, see
    `model.lora.adapter.use_adapters`. A head over labels that learnt beside them is filled.

    Raises:
        UserError: no adapter, or one for a model of another shape or with other modules.
    Memory: the adapters.
    """
    folder = Path(folder)
    info = read_info(folder)
    heads = _head_names(model.config)
    adapters: dict[str, LoraAdapter] = {}
    problems, known = [], peft_names(model.config)
    with open_weights(folder, "pt") as stored:
        left = set(stored.keys())
        if heads and left >= set(heads.values()):
            left -= set(heads.values())
            tensors = {name: stored.get_tensor(there) for name, there in heads.items()}
            problems += _fill({name: model.get_parameter(name) for name in heads}, tensors)
        rows = None
        if info.settings.tokens is not None:
            rows = TokenRows(model, info.settings.tokens)
            used, wrong = _fill_rows(rows, model, stored)
            left, problems = left - used, problems + wrong
        if tables := sorted(name for name in left if _TABLE.search(name)):
            raise UserError(
                "--adapter = {folder}, holds tables of tokens beside the matrices of blocks, trained or resized with "
                "it ({tables}), which have no place here; merge it by PEFT's merge_and_unload, and name what comes "
                "out",
                folder=folder,
                tables=join(", ", tables),
            )
        lacking = [] if info.fingerprint else [name for name in _wanted(folder, known) if name not in left]
        for path, linear in linears(model).items():
            names = known[path]
            if names["a"] not in left:
                continue
            tensors = {part: stored.get_tensor(name) for part, name in names.items() if name in left}
            left -= set(names.values())
            adapter = LoraAdapter(linear.weight, info.settings, 0)
            wrong = _fill(dict(adapter.named_parameters()), tensors, f"{path}: ")
            problems += wrong
            if not wrong:
                adapters[path] = adapter
    if left or not adapters:
        example = say(", such as {left}", left=min(left)) if left else ""
        problems.append(
            say(
                "holds {tensors} for modules that this model does not have{example}; it has {targets_of}",
                tensors=counted(len(left), "tensor"),
                example=example,
                targets_of=join(", ", targets_of(model.config)),
            )
        )
    if problems:
        raise UserError(
            "--adapter = {folder}, is for another base: {problems}", folder=folder, problems=join("; ", problems[:3])
        )
    if lacking:
        raise UserError(
            "--adapter = {folder}, lacks {tensors} of the modules that its {config_file} names, such as "
            "{lacking}; save it again, or copy it again",
            folder=folder,
            tensors=counted(len(lacking), "tensor"),
            config_file=CONFIG_FILE,
            lacking=min(lacking),
        )
    return adapters, rows


def _row_names(config: T5ModelConfig) -> list[str]:
    """PEFT's names of the rows of tokens in the embedding: it knows one of a tied embedding, and two copies of another."""
    table = published_names(config)["embedding"].removesuffix(".weight")
    is_tied = config.tie_word_embeddings or not config.is_text
    tables = [table] if is_tied else ["encoder.embed_tokens", "decoder.embed_tokens"]
    return [f"{_BASE}{each}.token_adapter.trainable_tokens_delta" for each in tables]


def _fill_rows(rows: TokenRows, model: T5, stored: Any) -> tuple[set[str], list[str]]:
    """Copy the rows of tokens; returns the names of tensors that were read, and what is wrong with them."""
    names, head, (first, last) = {*_row_names(model.config)}, _BASE + HEAD_TABLE, rows.tokens
    names |= set() if rows.head is None else {head}
    if missing := names - set(stored.keys()):
        return set(), [say("lacks {missing}, the rows of its tokens", missing=join(", ", sorted(missing)))]
    with torch.no_grad():
        for name in names - {head}:
            if stored.get_slice(name).get_shape() != list(rows.embedding.shape):
                return names, [
                    say(
                        "{name} is {shape} and not {expected}",
                        name=name,
                        shape=stored.get_slice(name).get_shape(),
                        expected=list(rows.embedding.shape),
                    )
                ]
            rows.embedding.copy_(stored.get_tensor(name))
        if rows.head is not None:
            rows.head.copy_(stored.get_slice(head)[first : last + 1])
    return names, []


def _wanted(folder: Path, known: dict[str, dict[str, str]]) -> list[str]:
    """The first tensors of the adapters that a configuration asks for, as far as it does so by plain names alone."""
    raw = read_json(folder / CONFIG_FILE)
    targets = raw.get("target_modules")
    if not isinstance(targets, list) or raw.get("exclude_modules") or raw.get("layers_to_transform") is not None:
        return []
    ends = tuple(f".{target}.{_PARTS['a']}" for target in targets)
    return [names["a"] for names in known.values() if names["a"].endswith(ends)]


def _fill(targets: dict[str, nn.Parameter], tensors: dict[str, Tensor], prefix: str = "") -> list[str]:
    """Copy tensors into the weights of the same names, if all fit; returns what is wrong with them."""
    wrong: list[str] = [
        say(
            "{prefix}{name} is {shape} and not {expected}",
            prefix=prefix,
            name=name,
            shape=list(tensors[name].shape) if name in tensors else say("missing"),
            expected=list(weight.shape),
        )
        for name, weight in targets.items()
        if name not in tensors or tensors[name].shape != weight.shape
    ]
    if not wrong:
        with torch.no_grad():
            for name, weight in targets.items():
                weight.copy_(tensors[name])
    return wrong
