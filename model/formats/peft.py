"""How does an adapter become a folder that PEFT loads, and such a folder an adapter?

`adapter_config.json` says rank, scaling and targets, `adapter_model.safetensors` holds the thin matrices under the names
that PEFT gives them on transformers' T5. The file's own metadata, which PEFT does not read, holds the fingerprint of the
base: PEFT itself would put an adapter on any model of the same shape.

Source: PEFT 0.17-0.21, `LoraConfig` and `get_peft_model_state_dict`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from config import T5ModelConfig
from model.formats.tensor_files import read_json
from model.lora.adapter import LoraAdapter, adapters_of, linears
from model.lora.form import AdapterInfo, LoraSettings
from model.shapes import targets_of, weights
from model.t5 import T5
from settings.fields import UserError, counted

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_PARTS = {"a": "lora_A.weight", "b": "lora_B.weight", "magnitude": "lora_magnitude_vector"}
_FINGERPRINT = "base_fingerprint"
HIGHEST_RANK = 4096  # as of the setting lora_rank


def is_adapter(folder: str | Path) -> bool:
    """Whether a folder holds an adapter and no model."""
    return (Path(folder) / CONFIG_FILE).is_file()


def peft_names(config: T5ModelConfig) -> dict[str, dict[str, str]]:
    """Path of a matrix -> PEFT's name of each part (a, b, magnitude) of its adapter."""
    return {
        weight.name.removesuffix(".weight"): {
            part: f"base_model.model.{weight.hf_name.removesuffix('.weight')}.{name}" for part, name in _PARTS.items()
        }
        for weight in weights(config)
        if weight.is_product
    }


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
        names[path][part]: weight.detach().cpu().contiguous()
        for path, adapter in adapters_of(model).items()
        for part, weight in adapter.named_parameters()
    }
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt", _FINGERPRINT: fingerprint})
    about = {
        "peft_type": "LORA", "task_type": "SEQ_2_SEQ_LM", "base_model_name_or_path": base, "r": settings.rank,
        "lora_alpha": settings.alpha, "lora_dropout": settings.dropout, "target_modules": list(settings.targets),
        "use_rslora": settings.rank_stabilised, "use_dora": settings.dora, "bias": "none", "fan_in_fan_out": False,
        "inference_mode": True, "init_lora_weights": True, "modules_to_save": None,
    }  # fmt: skip
    (folder / CONFIG_FILE).write_text(json.dumps(about, indent=2) + "\n", encoding="utf8")


def read_info(folder: str | Path) -> AdapterInfo:
    """Read what an adapter is and what it belongs to.

    Raises:
        UserError: no adapter, a broken one, or one with parts that have no place here.
    """
    folder = Path(folder)
    raw = read_json(folder / CONFIG_FILE)
    problems = [f"{folder}, {text}" for text in _foreign(raw)]
    if problems:
        raise UserError(*problems)
    targets = raw.get("target_modules") or []
    names = tuple(targets) if isinstance(targets, list) else (targets,)
    alpha, dropout = float(raw.get("lora_alpha", 8)), float(raw.get("lora_dropout", 0.0))
    is_stabilised, is_dora = bool(raw.get("use_rslora")), bool(raw.get("use_dora"))
    settings = LoraSettings(raw.get("r", 8), alpha, names, dropout, is_stabilised, is_dora)
    with _open(folder) as stored:
        fingerprint = (stored.metadata() or {}).get(_FINGERPRINT, "")
    return AdapterInfo(settings, str(raw.get("base_model_name_or_path") or ""), fingerprint)


def _foreign(raw: dict[str, Any]) -> list[str]:
    wanted = {"peft_type": ("LORA",), "bias": ("none", None)}
    problems = [
        f"{name} = {raw.get(name)}, is not supported; allowed: {', '.join(str(v) for v in values if v)}"
        for name, values in wanted.items()
        if raw.get(name) not in values
    ]
    for name in ("modules_to_save", "rank_pattern", "alpha_pattern", "layers_to_transform", "fan_in_fan_out"):
        if raw.get(name):
            problems.append(f"{name} = {raw[name]}, is not supported; make the adapter without it")
    return problems + _impossible(raw)


def _impossible(raw: dict[str, Any]) -> list[str]:
    """Values that no adapter can have."""
    targets = raw.get("target_modules") or []
    names = targets if isinstance(targets, list) else [targets]
    numbers = (
        ("r", 8, int, 1, HIGHEST_RANK, f"a whole number from 1 to {HIGHEST_RANK:,}"),
        ("lora_alpha", 8, (int, float), -1e9, 1e9, "a number"),
        ("lora_dropout", 0.0, (int, float), 0, 1, "0 up to 1"),
    )
    problems = [
        f"{name} = {str(raw[name])[:60]}, is wrong; allowed: {allowed}"
        for name, default, kind, low, high, allowed in numbers
        if not _is_number(raw.get(name, default), kind, low, high)
    ]
    if not all(isinstance(name, str) for name in names):
        problems.append(f"target_modules = {str(targets)[:60]}, is wrong; allowed: a name or a list of names")
    return problems


def _is_number(value: Any, kind: Any, low: float, high: float) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool) and low <= value <= high


def _open(folder: Path) -> Any:
    try:
        return safe_open(folder / WEIGHTS_FILE, framework="pt")
    except FileNotFoundError:
        raise UserError(f"{folder}, holds no {WEIGHTS_FILE}; copy the adapter again") from None
    except (SafetensorError, OSError) as error:
        raise UserError(f"{folder / WEIGHTS_FILE}, is cut off or broken ({error}); copy it again") from None


def load_adapters(model: T5, folder: str | Path) -> dict[str, LoraAdapter]:
    """Read the adapters of a folder for this model; they are not on yet, see `model.lora.adapter.use_adapters`.

    Raises:
        UserError: no adapter, or one for a model of another shape or with other modules.
    Memory: the adapters.
    """
    folder = Path(folder)
    info = read_info(folder)
    adapters: dict[str, LoraAdapter] = {}
    problems, known = [], peft_names(model.config)
    with _open(folder) as stored:
        left = set(stored.keys())
        for path, linear in linears(model).items():
            names = {part: name for part, name in known[path].items() if part != "magnitude" or info.settings.dora}
            if names["a"] not in left:
                continue
            tensors = {part: stored.get_tensor(name) for part, name in names.items() if name in left}
            left -= set(names.values())
            problems += _fill(adapters, path, LoraAdapter(linear.weight, info.settings, 0), tensors)
    if left or not adapters:
        example = f", such as {min(left)}" if left else ""
        problems.append(
            f"holds {counted(len(left), 'tensor')} for modules that this model does not have{example}; "
            f"it has {', '.join(targets_of(model.config))}"
        )
    if problems:
        raise UserError(f"--adapter = {folder}, is for another base: {'; '.join(problems[:3])}")
    return adapters


def _fill(adapters: dict[str, LoraAdapter], path: str, adapter: LoraAdapter, tensors: dict[str, Tensor]) -> list[str]:
    """Copy one adapter's tensors; returns what is wrong with it."""
    wrong = [
        f"{path}: {part} is {list(tensors[part].shape) if part in tensors else 'missing'} and not {list(weight.shape)}"
        for part, weight in adapter.named_parameters()
        if part not in tensors or tensors[part].shape != weight.shape
    ]
    if not wrong:
        with torch.no_grad():
            for part, weight in adapter.named_parameters():
                weight.copy_(tensors[part])
        adapters[path] = adapter
    return wrong
