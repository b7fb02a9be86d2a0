"""An adapter folder's form and base, read from `adapter_config.json` and a header; no torch.

Source: PEFT 0.17-0.21, `LoraConfig`.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from language import join, say
from model.formats.headers import read_json
from model.lora.form import AdapterInfo, LoraSettings
from settings.consistency import REGRESSION, SEQUENCE, TOKEN
from settings.declared import settings_by_name
from settings.errors import UserError, refuse
from settings.fields import parse
from settings.program import program

CONFIG_FILE, WEIGHTS_FILE, PICKLE_FILE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
FINGERPRINT, HEAD = "base_fingerprint", "head"  # in the metadata of the file of weights
SAVED_MODULES = {"classifier", "score", "classification_head"}  # that PEFT may save beside adapters: heads over labels
TABLES = ("shared", "embed_tokens")  # whose rows of tokens may have learnt
# how PEFT may have begun an adapter and left its base as it was; pissa, olora, corda, loftq and others take from the base
BEGUN_BESIDE = ("gaussian", "eva", "orthogonal", "mica", "true", "false")
HIGHEST_RANK = 4096  # as of the setting lora_rank
MOST_TOKENS = 2**24  # no vocabulary has more
# what an adapter_config.json may say without another computation than of rank, scaling and targets
HARMLESS = {
    "auto_mapping", "base_model_name_or_path", "bias", "corda_config", "ensure_weight_tying", "eva_config", "exclude_modules",
    "inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform", "loftq_config", "lora_alpha",
    "lora_dropout", "lora_ga_config", "megatron_core", "peft_type", "peft_version", "qalora_group_size", "r", "revision",
    "runtime_config", "target_modules", "target_parameters", "task_type", "trainable_token_indices", "use_rslora",
}  # fmt: skip


def is_adapter(folder: str | Path) -> bool:
    """Whether a folder holds an adapter and no model."""
    return (Path(folder) / CONFIG_FILE).is_file()


def read_info(folder: str | Path) -> AdapterInfo:
    """Read what an adapter is and what it belongs to.

    Raises:
        UserError: no adapter, a broken one, or one with parts that have no place here.
    """
    folder = Path(folder)
    raw = read_json(folder / CONFIG_FILE)
    problems = [say("{folder}, {problem}", folder=folder, problem=text) for text in _foreign(raw)]
    refuse(problems)
    targets = raw.get("target_modules") or []
    names = tuple(targets) if isinstance(targets, list) else (targets,)
    alpha, dropout = float(raw.get("lora_alpha", 8)), float(raw.get("lora_dropout", 0.0))
    rank, ids = raw.get("r", 8), _token_ids(raw)
    if raw.get("use_rslora"):
        alpha *= math.sqrt(rank)  # Rank-stabilised adapters are scaled by alpha / sqrt(rank), others by alpha / rank.
    tokens = (ids[0], ids[-1]) if ids else None
    settings = LoraSettings(rank, alpha, names, dropout, tokens)
    with open_weights(folder) as stored:
        about = stored.metadata() or {}
        try:
            head = _own_head(about[HEAD]) if HEAD in about else _head(raw, stored)
        except (ValueError, TypeError, LookupError) as error:
            raise UserError(
                "{folder}, its head cannot be read ({error}); copy the adapter again", folder=folder, error=error
            ) from None
    return AdapterInfo(settings, str(raw.get("base_model_name_or_path") or ""), about.get(FINGERPRINT, ""), head)


def _token_ids(raw: dict[str, Any]) -> list[int]:
    """The tokens whose rows learnt beside the matrices."""
    named = raw.get("trainable_token_indices") or []
    lists = list(named.values()) if isinstance(named, dict) else [named]
    return lists[0] if lists else []


def _own_head(text: str) -> dict[str, Any]:
    """The head of an adapter that was written here."""
    raw, known = json.loads(text), settings_by_name()
    fields = {name: parse(known[name][1], raw[name]) for name in ("head", "labels", "pooling", "head_kind")}
    return {**fields, "has_decoder": bool(raw["has_decoder"])}


def _head(raw: dict[str, Any], stored: Any) -> dict[str, Any]:
    """The head of an adapter of PEFT, by its task."""
    of_task = {
        "TOKEN_CLS": (TOKEN, "classifier", "linear"), "SEQ_CLS": (SEQUENCE, "classification_head.out_proj", "dense"),
    }  # fmt: skip
    task = raw.get("task_type")
    if task == "FEATURE_EXTRACTION":
        return {"head": "none", "has_decoder": False}
    if task not in of_task:
        return {}
    head, layer, kind = of_task[task]
    name = f"base_model.model.{layer}.weight"
    if name not in stored.keys():  # noqa: SIM118
        return {}
    count = stored.get_slice(name).get_shape()[0]
    labels = REGRESSION if count == 1 else str(count)
    return {"head": head, "labels": labels, "head_kind": kind, "has_decoder": head == SEQUENCE}


def _foreign(raw: dict[str, Any]) -> list[str]:
    wanted = {"peft_type": ("LORA",), "bias": ("none", None)}
    problems: list[str] = [
        say(
            "{name} = {value}, is not supported; allowed: {values}",
            name=name,
            value=raw.get(name),
            values=join(", ", (str(v) for v in values if v)),
        )
        for name, values in wanted.items()
        if raw.get(name) not in values
    ]
    saved = SAVED_MODULES | ({"lm_head"} if raw.get("trainable_token_indices") else set())
    problems += [
        say(
            "{name} = {value}, is not supported; make the adapter without it, or merge it by PEFT's merge_and_unload",
            name=name,
            value=str(value)[:60],
        )
        for name, value in raw.items()
        if value and name not in HARMLESS and not (name == "modules_to_save" and set(value) <= saved)
    ]
    named, ids = raw.get("trainable_token_indices") or [], _token_ids(raw)
    is_known = not isinstance(named, dict) or (
        set(named) <= set(TABLES) and all(each == ids for each in named.values())
    )
    is_range = all(type(one) is int for one in ids) and (not ids or ids == list(range(ids[0], ids[0] + len(ids))))
    if not is_known or not is_range or (ids and not 0 <= ids[0] <= ids[-1] < MOST_TOKENS):
        problems.append(
            say(
                "trainable_token_indices = {named}, is not supported; allowed: ids one after the other, of {tables}; "
                "merge it by PEFT's merge_and_unload",
                named=str(named)[:60],
                tables=join(" or ", TABLES),
            )
        )
    begun = raw.get("init_lora_weights", True)
    if isinstance(begun, str) and begun.lower() not in BEGUN_BESIDE:
        problems.append(
            say(
                "init_lora_weights = {begun}, has changed its base besides, which is not in the folder; save it "
                "again with path_initial_model_for_weight_conversion of PEFT's save_pretrained, or after "
                "merge_and_unload",
                begun=begun,
            )
        )
    return problems + _impossible(raw)


def _impossible(raw: dict[str, Any]) -> list[str]:
    targets = raw.get("target_modules") or []
    names = targets if isinstance(targets, list) else [targets]
    numbers = (
        ("r", 8, (int,), 1, HIGHEST_RANK, say("a whole number from 1 to {highest_rank:,}", highest_rank=HIGHEST_RANK)),
        ("lora_alpha", 8, (int, float), -1e9, 1e9, say("a number")),
        ("lora_dropout", 0.0, (int, float), 0, 1, say("0 up to 1")),
    )
    problems: list[str] = [
        say("{name} = {raw}, is wrong; allowed: {allowed}", name=name, raw=str(raw[name])[:60], allowed=allowed)
        for name, default, kind, low, high, allowed in numbers
        if type(value := raw.get(name, default)) not in kind or not low <= value <= high
    ]
    if not all(isinstance(name, str) for name in names):
        problems.append(
            say("target_modules = {targets}, is wrong; allowed: a name or a list of names", targets=str(targets)[:60])
        )
    return problems


def adapter_bytes(folder: Path) -> int:
    """What an adapter takes in memory, where its numbers are fp32. Raises as `open_weights`."""
    with open_weights(folder) as stored:
        return sum(4 * math.prod(stored.get_slice(name).get_shape()) for name in stored.keys())  # noqa: SIM118


def open_weights(folder: Path, framework: str = "numpy") -> Any:
    """The file of an adapter's weights, as safetensors opens it.

    Args:
        framework: whose tensors come out of it: "numpy" or "pt".
    Raises:
        UserError: there is none, or it is broken.
    """
    try:
        return safe_open(folder / WEIGHTS_FILE, framework=framework)
    except FileNotFoundError:
        if (folder / PICKLE_FILE).is_file():
            raise UserError(
                "{folder}, holds {pickle_file}, a pickle as older PEFT wrote adapters, and no {weights_file}; it is "
                "not read here, because a pickle can run code: where you trust it, convert it once by {program} "
                "convert --model={folder} --output=FOLDER --allow_pickle=True",
                folder=folder,
                pickle_file=PICKLE_FILE,
                weights_file=WEIGHTS_FILE,
                program=program(),
            ) from None
        raise UserError(
            "{folder}, holds no {weights_file}; copy the adapter again", folder=folder, weights_file=WEIGHTS_FILE
        ) from None
    except (SafetensorError, OSError) as error:
        raise UserError(
            "{folder}, is cut off or broken ({error}); copy it again", folder=folder / WEIGHTS_FILE, error=error
        ) from None
