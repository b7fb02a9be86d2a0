"""An adapter folder's form and base, read from `adapter_config.json` and a header; no torch.

Source: PEFT 0.17-0.21, `LoraConfig`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from model.formats.headers import read_json
from model.formats.heads import CLASSES, HEAD_FIELDS, HEAD_KINDS, TEXT_CLASS, labels_of
from model.lora.form import AdapterInfo, LoraSettings
from settings.declared import settings_by_name
from settings.errors import UserError, refuse
from settings.fields import parse
from settings.program import program
from support.language import join, say

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
PICKLE_FILE = "adapter_model.bin"
BASE = "base_model.model."  # The names of a base's modules begin with it.
# Keys in the metadata of the file of weights.
FINGERPRINT = "base_fingerprint"
HEAD = "head"
DEFAULTS = {"r": 8, "lora_alpha": 8, "lora_dropout": 0.0, "init_lora_weights": True}
SAVED_MODULES = {"classifier", "score", "classification_head"}  # Heads over labels that PEFT may save beside adapters.
TABLES = ("shared", "embed_tokens")  # The tables of which rows of tokens may be trained.
# How PEFT may have begun an adapter and left its base as it was; pissa, olora, corda, loftq and others take from the
# base.
BEGUN_BESIDE = ("gaussian", "eva", "orthogonal", "mica", "true", "false", "none")
HIGHEST_RANK = 4096  # The setting lora_rank has the same bound.
MOST_TOKENS = 2**24  # No vocabulary has more.
# What an adapter_config.json may say besides, without another computation than of rank, scaling and targets.
HARMLESS = {
    "auto_mapping",
    "base_model_name_or_path",
    "corda_config",
    "ensure_weight_tying",
    "eva_config",
    "exclude_modules",
    "inference_mode",
    "layers_pattern",
    "layers_to_transform",
    "loftq_config",
    "lora_ga_config",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "target_parameters",
    "task_type",
    "use_rslora",
}
_ELSEWHERE = say("is not supported; make the adapter without it, or merge it by PEFT's merge_and_unload")


def is_adapter(folder: str | Path) -> bool:
    """Whether a folder holds an adapter and no model."""
    return (Path(folder) / CONFIG_FILE).is_file()


def read_info(folder: str | Path) -> AdapterInfo:
    """Read what an adapter is and what it belongs to.

    Raises:
        UserError: no adapter, a broken one, or one with parts that have no place here.
    """
    folder = Path(folder)
    raw = {**DEFAULTS, **read_json(folder / CONFIG_FILE)}
    refuse([say("{folder}, {problem}", folder=folder, problem=problem) for problem in _problems(raw)])
    alpha = float(raw["lora_alpha"])
    if raw.get("use_rslora"):
        alpha *= math.sqrt(
            raw["r"]
        )  # Rank-stabilised adapters are scaled by alpha / sqrt(rank), others by alpha / rank.
    settings = LoraSettings(
        raw["r"], alpha, tuple(_list(raw, "target_modules")), float(raw["lora_dropout"]), _token_range(raw)
    )
    with open_weights(folder) as weights:
        about = weights.metadata() or {}
        try:
            head = _own_head(about[HEAD]) if HEAD in about else _head_of_task(raw, weights)
        except (ValueError, TypeError, LookupError) as error:
            raise UserError(
                "{folder}, its head cannot be read ({error}); copy the adapter again", folder=folder, error=error
            ) from None
    return AdapterInfo(settings, str(raw.get("base_model_name_or_path") or ""), about.get(FINGERPRINT, ""), head)


def _list(raw: Mapping[str, Any], key: str) -> list[Any]:
    """What a key lists; a single name counts as a list of it."""
    value = raw.get(key) or []
    return value if isinstance(value, list) else [value]


def _token_range(raw: Mapping[str, Any]) -> tuple[int, int] | None:
    """The first and the last of the tokens whose rows learnt beside the matrices; None: none did.

    Raises:
        ValueError, TypeError: they are no range, or not of the embedding.
    """
    indices = raw.get("trainable_token_indices")
    lists: dict[str, Any] = indices if isinstance(indices, dict) else {TABLES[0]: indices}
    if not any(lists.values()):
        return None
    (ids,) = set(map(tuple, lists.values()))
    is_range = ids == tuple(range(ids[0], ids[0] + len(ids))) and 0 <= ids[0] <= ids[-1] < MOST_TOKENS
    if not is_range or not lists.keys() <= set(TABLES):
        raise ValueError
    return ids[0], ids[-1]


def _has_token_range(raw: Mapping[str, Any]) -> bool:
    try:
        _token_range(raw)
    except (ValueError, TypeError):
        return False
    return True


def _is_number(value: Any, kinds: tuple[type, ...], low: float, high: float) -> bool:
    return type(value) in kinds and low <= value <= high


def _has_known_modules(raw: Mapping[str, Any]) -> bool:
    """Whether only heads were saved whole: those over labels, and beside rows of tokens that over the vocabulary."""
    heads = SAVED_MODULES | ({"lm_head"} if raw.get("trainable_token_indices") else set())
    return heads.issuperset(map(str, _list(raw, "modules_to_save")))


# Key of adapter_config.json, whether what it says can be done, and what is wrong otherwise.
_CHECKS: tuple[tuple[str, Callable[[Mapping[str, Any]], bool], str], ...] = (
    ("peft_type", lambda raw: raw.get("peft_type") == "LORA", say("is not supported; allowed: LORA")),
    ("bias", lambda raw: raw.get("bias") in ("none", None), say("is not supported; allowed: none")),
    (
        "r",
        lambda raw: _is_number(raw["r"], (int,), 1, HIGHEST_RANK),
        say("is wrong; allowed: a whole number from 1 to {highest_rank:,}", highest_rank=HIGHEST_RANK),
    ),
    (
        "lora_alpha",
        lambda raw: _is_number(raw["lora_alpha"], (int, float), -1e9, 1e9),
        say("is wrong; allowed: a number"),
    ),
    (
        "lora_dropout",
        lambda raw: _is_number(raw["lora_dropout"], (int, float), 0, 1),
        say("is wrong; allowed: 0 up to 1"),
    ),
    (
        "target_modules",
        lambda raw: all(isinstance(name, str) for name in _list(raw, "target_modules")),
        say("is wrong; allowed: a name or a list of names"),
    ),
    ("modules_to_save", _has_known_modules, _ELSEWHERE),
    (
        "trainable_token_indices",
        _has_token_range,
        say(
            "is not supported; allowed: ids one after the other, of {tables}; merge it by PEFT's merge_and_unload",
            tables=join(" or ", TABLES),
        ),
    ),
    (
        "init_lora_weights",
        lambda raw: str(raw.get("init_lora_weights")).lower() in BEGUN_BESIDE,
        say(
            "has changed its base besides, which is not in the folder; save it again with "
            "path_initial_model_for_weight_conversion of PEFT's save_pretrained, or after merge_and_unload"
        ),
    ),
)


def _problems(raw: Mapping[str, Any]) -> Iterator[str]:
    """What a configuration asks for that is not done here."""
    for name, is_sound, problem in _CHECKS:
        if not is_sound(raw):
            yield say("{name} = {value}, {problem}", name=name, value=str(raw.get(name))[:60], problem=problem)
    for name in sorted(raw.keys() - HARMLESS - {name for name, *_ in _CHECKS}):
        if raw[name]:
            yield say("{name} = {value}, {problem}", name=name, value=str(raw[name])[:60], problem=_ELSEWHERE)


def _own_head(text: str) -> dict[str, Any]:
    """The head of an adapter that was written here."""
    raw = json.loads(text)
    fields = {name: parse(settings_by_name()[name][1], raw[name]) for name in (*HEAD_FIELDS, "labels")}
    return {**fields, "has_decoder": bool(raw["has_decoder"])}


def _head_of_task(raw: Mapping[str, Any], weights: Any) -> dict[str, Any]:
    """The head of an adapter of PEFT, by its task; empty where it is that of its base."""
    published = next((each for each in CLASSES if each.task == raw.get("task_type")), TEXT_CLASS)
    head = {"head": published.head, "has_decoder": published.has_decoder}
    if not published.output:
        return {} if published.writes_text else head
    name = f"{BASE}{published.output}.weight"
    if name not in weights.keys():  # noqa: SIM118
        return {}
    labels = labels_of({"num_labels": weights.get_slice(name).get_shape()[0]})
    return {**head, "labels": labels, "head_kind": HEAD_KINDS[published.is_dense]}


def adapter_bytes(folder: Path) -> int:
    """What an adapter takes in memory, where its numbers are fp32. Raises as `open_weights`."""
    with open_weights(folder) as weights:
        return sum(4 * math.prod(weights.get_slice(name).get_shape()) for name in weights.keys())  # noqa: SIM118


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
