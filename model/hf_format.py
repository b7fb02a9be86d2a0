"""How does a model become a Hugging Face folder, and such a folder a model?

Two translations, each in one table: names of tensors, and `config.json`. Tensors pass one by one, so that neither way
needs more memory than the model and a piece of one tensor. Read are T5 1.0, T5 1.1, Flan, mT5, UMT5, ByT5 and
CodeT5, in one file or in shards; what is written loads in `AutoModelForSeq2SeqLM` as it is.

Two meanings differ between versions of transformers, and are settled here:
- Whether the head is the embedding is read from the tensors: up to version 4 `tie_word_embeddings` says it, from
  version 5 on the flag is always true and a head of its own is simply there.
- Whether the decoder's output is scaled by d_model^-0.5: `scale_decoder_outputs` where given (T5 from version 5 on),
  else never for mT5, else where `tie_word_embeddings` is not false. From version 5 on every UMT5 is scaled; so a UMT5
  that was trained without is read as scaled with a final norm d_model^0.5 larger: the same function.

Source: transformers 5.23 and 4.57, models t5, mt5, umt5.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from config import T5ModelConfig
from model.decoding.passing import WithWeights, in_place
from model.formats.tensor_files import INT8_FILE, SCALE, TensorFolder, read_json, write_safetensors, write_shards
from model.quantization import fill_int8, is_int8, scale_of
from model.shapes import hf_names, weight_counts, weights
from model.t5 import T5, Filling, Parts, in_memory
from settings.fields import UserError, counted, parse

CONFIG_FILE, GENERATION_FILE = "config.json", "generation_config.json"
Cut = Callable[[T5], Parts]

_FAMILY_DEFAULTS: dict[str, dict[str, Any]] = {
    "t5": {"dropout_rate": 0.1},
    "mt5": {
        "dropout_rate": 0.1,
        "vocab_size": 250112,
        "d_ff": 1024,
        "num_layers": 8,
        "num_heads": 6,
        "feed_forward_proj": "gated-gelu",
    },
}
_FAMILY_DEFAULTS["umt5"] = _FAMILY_DEFAULTS["mt5"]
# a configuration may speak of more weights than its files have bytes only so far, and so small that the message which
# names each missing tensor costs nothing
LEAST_FILE_SHARE, SMALL_MODEL = 2, 10**6
_FREE_FIELDS = ("dropout_rate", "initializer_factor")  # choices of a training run, not of a checkpoint

_EMBEDDING, _HEAD = "shared.weight", "lm_head.weight"
_EMBEDDING_COPIES = ("decoder.embed_tokens.weight", "encoder.embed_tokens.weight")
# written by old versions, used by none
_IGNORED = ("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",)


def _embedding_name(stored: TensorFolder) -> str:
    """The name under which the embedding is stored here."""
    return next((name for name in (_EMBEDDING, *_EMBEDDING_COPIES, _HEAD) if name in stored.names), _EMBEDDING)


def _is_tied(stored: TensorFolder, flag: bool) -> bool:
    """Whether the head is the embedding; where the flag says so, a head of its own must differ to count."""
    embedding = _embedding_name(stored)
    if _HEAD not in stored.names or embedding == _HEAD:
        return True
    return flag and stored.equal(embedding, _HEAD)


def read_config(folder: str | Path, allow_pickle: bool = False) -> T5ModelConfig:
    """The shape of the model that `load` would return.

    Args:
        allow_pickle: whether pickled weights may be opened.
    Raises:
        UserError: no `config.json`, not a T5, or values that no T5 can have (all of them at once); no readable weights.
    """
    path = Path(folder) / CONFIG_FILE
    return _config_from(path, read_json(path), TensorFolder(Path(folder), allow_pickle))


def stored_dtype(folder: str | Path, allow_pickle: bool = False) -> torch.dtype:
    """What the matrices of a folder are stored as, read from the tensors themselves.

    Raises:
        UserError: no readable weights.
    """
    stored = TensorFolder(Path(folder), allow_pickle)
    name = _embedding_name(stored)
    if name not in stored.names:
        raise UserError(f"{folder}, holds no {_EMBEDDING}; name the folder of a T5 model")
    return stored.dtype(name)


def _family(raw: dict[str, Any]) -> Any:
    """The model type; the first configurations name the class alone."""
    names = raw.get("architectures")
    if "model_type" in raw or not isinstance(names, list) or not names:
        return raw.get("model_type")
    name = str(names[0]).lower()
    return next((family for family in ("umt5", "mt5", "t5") if name.startswith(family)), name)


def _feed_forward(raw: dict[str, Any]) -> str | None:
    """The activation, where a configuration gives its two halves alone: `dense_act_fn` and `is_gated_act`."""
    activation = raw.get("dense_act_fn")
    if raw.get("feed_forward_proj") is not None or activation is None:
        return raw.get("feed_forward_proj")
    return ("gated-" if raw.get("is_gated_act") else "") + str(activation).replace("gelu_new", "gelu")


def _config_from(path: Path, raw: dict[str, Any], stored: TensorFolder) -> T5ModelConfig:
    family, raw = _family(raw), {**raw, "feed_forward_proj": _feed_forward(raw)}
    if not isinstance(family, str) or family not in _FAMILY_DEFAULTS:
        raise UserError(f"{path}: model_type = {family}, is not a T5; allowed: {', '.join(_FAMILY_DEFAULTS)}")
    values = {**_FAMILY_DEFAULTS[family], **{name: value for name, value in raw.items() if value is not None}}
    values.setdefault("num_decoder_layers", values.get("num_layers", T5ModelConfig.num_layers))
    tied_flag = values.get("tie_word_embeddings", True) is not False
    values.setdefault("scale_decoder_outputs", family == "umt5" or (family == "t5" and tied_flag))
    values.update(tie_word_embeddings=_is_tied(stored, tied_flag), bias_in_every_layer=family == "umt5")
    if isinstance(values.get("eos_token_id"), list) and values["eos_token_id"]:
        values["eos_token_id"] = values["eos_token_id"][0]
    taken: dict[str, Any] = {}
    problems = []
    for member in dataclasses.fields(T5ModelConfig):
        try:
            taken[member.name] = parse(member, values.get(member.name, member.default))
        except ValueError as error:
            problems.append(f"{path}: {member.name} = {values[member.name]}, {error}")
    config = T5ModelConfig(**taken)
    start = values.get("decoder_start_token_id", config.pad_token_id)
    if start != config.pad_token_id:
        problems.append(f"{path}: decoder_start_token_id = {start}, must be pad_token_id ({config.pad_token_id})")
    if problems := problems or _beyond_its_tensors(path, config, stored):
        raise UserError(*problems)
    return config


def _beyond_its_tensors(path: Path, config: T5ModelConfig, stored: TensorFolder) -> list[str]:
    """Find sizes that the tensors beside a configuration cannot have, before anything is made of such a size."""
    problems, names, size = [], len(stored.names), weight_counts(config)["total"]
    if config.num_layers + config.num_decoder_layers > names:
        problems.append(
            f"{path}: num_layers = {config.num_layers}, num_decoder_layers = {config.num_decoder_layers}, the files hold "
            f"{counted(names, 'tensor')}, fewer than that; use the config.json that belongs to them"
        )
    if size > LEAST_FILE_SHARE * stored.file_bytes + SMALL_MODEL:
        problems.append(
            f"{path}: speaks of {size:,} weights (vocab_size {config.vocab_size}, d_model {config.d_model}, d_kv "
            f"{config.d_kv}, d_ff {config.d_ff}, num_heads {config.num_heads}), the files hold {stored.file_bytes:,} bytes; "
            "use the config.json that belongs to them"
        )
    return problems


def write_config(config: T5ModelConfig, folder: str | Path, dtype: torch.dtype = torch.float32) -> None:
    """Write `config.json` and `generation_config.json` into an existing folder.

    Args:
        dtype: of the weights, which transformers then loads them as.
    Raises:
        OSError: the folder cannot be written.
    """
    values = dataclasses.asdict(config)
    family = "umt5" if values.pop("bias_in_every_layer") else "t5"
    tokens = {
        "decoder_start_token_id": config.pad_token_id,
        "eos_token_id": config.eos_token_id,
        "pad_token_id": config.pad_token_id,
    }
    about = {
        "architectures": [f"{family.upper()}ForConditionalGeneration"],
        "model_type": family,
        "is_encoder_decoder": True,
        "dtype": str(dtype).removeprefix("torch."),
    }
    for name, content in ((CONFIG_FILE, {**about, **values, **tokens}), (GENERATION_FILE, tokens)):
        (Path(folder) / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf8")


def load(
    folder: str | Path,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    expect: T5ModelConfig | None = None,
    cut: Cut | None = None,
    allow_pickle: bool = False,
    filling: Filling = in_memory,
) -> T5:
    """Read a model from a Hugging Face folder, in evaluation mode.

    Args:
        folder: holds `config.json` and `model.safetensors`, or shards of it with an index.
        dtype: what the weights become; norms and bias tables are fp32 always. int8: frozen, see `model.quantization`.
        device: where they go.
        expect: the shape that the checkpoint must have; the model keeps this configuration. None: any.
        cut: gives a model on "meta" its weights, some of them a part of their rows: name -> first row, rows of the whole.
        allow_pickle: whether pickled weights are read (by torch's weights-only loader) where there are no others.
        filling: a context around the filling of each weight, where `cut` has given it a place outside of memory.
    Raises:
        UserError: missing, broken or foreign files; another shape than expected.
    Memory: the model, and a chunk of one tensor (4 MiB).
    """
    stored = TensorFolder(Path(folder), allow_pickle)
    path = Path(folder) / CONFIG_FILE
    raw = read_json(path)
    config = _config_from(path, raw, stored)
    if expect is not None:
        _compare(folder, config, expect)
    as_int8 = dtype == torch.int8
    sources = _match(stored, expect or config)  # before memory is taken for a shape that the tensors lack
    model = T5(expect or config, "meta" if cut or as_int8 else device, torch.float32 if as_int8 else dtype)
    parts = {} if cut is None else cut(model)
    with torch.no_grad():
        if as_int8:
            assert not parts, "int8 weights are whole"
            fill_int8(model, lambda name: stored.chunks(sources[name]), device, filling)
        for name, parameter in () if as_int8 else model.named_parameters():
            with filling(parameter):
                stored.copy_into(sources[name], parameter, parts.get(name, (0, 0))[0])
        if _needs_folding(raw):
            model.decoder.final_norm.weight.mul_(config.d_model**0.5)
    return model.eval()


def _needs_folding(raw: dict[str, Any]) -> bool:
    """Whether this is a UMT5 as published, trained without scaled outputs; our own folders say what they are."""
    unscaled = raw.get("tie_word_embeddings") is False and raw.get("scale_decoder_outputs") is None
    return raw.get("model_type") == "umt5" and unscaled


def _compare(folder: str | Path, found: T5ModelConfig, expect: T5ModelConfig) -> None:
    names = [member.name for member in dataclasses.fields(T5ModelConfig) if member.name not in _FREE_FIELDS]
    different = [name for name in names if getattr(found, name) != getattr(expect, name)]
    if different:
        shown = ", ".join(f"{name} is {getattr(found, name)} and not {getattr(expect, name)}" for name in different)
        raise UserError(f"{folder}, is a checkpoint of another shape: {shown}; name the model that it was made with")


def _match(stored: TensorFolder, config: T5ModelConfig) -> dict[str, str]:
    """Our name -> stored name of every parameter; each must be there, in its shape, and nothing else."""
    sources = {**hf_names(config), "embedding": _embedding_name(stored)}
    wanted, found = set(sources.values()), stored.names
    shapes = {sources[weight.name]: weight.shape for weight in weights(config)}
    wrong = {name: stored.shape(name) for name in wanted & found if stored.shape(name) != shapes[name]}
    problems = []
    if bare := [name for name in wanted & found if stored.lacks_scale(name)]:
        problems.append(
            f"{stored.path}, holds int8 weights without their scales ({_listed(bare)}); copy the folder again"
        )
    if missing := wanted - found:
        problems.append(
            f"{stored.path}, lacks {counted(len(missing), 'tensor')} of the model ({_listed(missing)}); use a complete T5 checkpoint"
        )
    if foreign := found - wanted - {_EMBEDDING, _HEAD, *_EMBEDDING_COPIES, *_IGNORED}:
        problems.append(
            f"{stored.path}, holds {counted(len(foreign), 'tensor')} that its {CONFIG_FILE} has no place for ({_listed(foreign)})"
        )
    if wrong:
        shown = _listed(f"{name} is {list(shape)} and not {list(shapes[name])}" for name, shape in wrong.items())
        problems.append(f"{stored.path}, holds tensors of another shape than its {CONFIG_FILE} says: {shown}")
    if problems:
        raise UserError(*problems)
    return sources


_BLOCK = re.compile(r"\bblock\.(\d+)\.")


def _listed(names: Iterable[str]) -> str:
    """All names; those that differ in the number of their block alone stand once, `block.{0,1,2}`."""
    blocks: dict[str, list[str]] = {}
    for name in names:
        number = _BLOCK.search(name)
        blocks.setdefault(_BLOCK.sub("block.*.", name, count=1), []).extend(number.groups() if number else ())
    shown = []
    for name, numbers in sorted(blocks.items()):
        ordered = ",".join(sorted(numbers, key=int))
        shown.append(name.replace("*", ordered if len(numbers) == 1 else f"{{{ordered}}}", 1))
    return ", ".join(shown)


def save(model: T5, folder: str | Path, shard_bytes: int | None = None, held: WithWeights = in_place) -> None:
    """Write a folder that `AutoModelForSeq2SeqLM.from_pretrained` loads: weights in their dtype, and configuration.

    Weights in int8 go into a file of another name, which this program alone loads.

    The caller makes the change atomic (writes beside, then renames).

    Args:
        shard_bytes: most bytes of one file of weights, as far as single tensors allow; None: one file.
        held: a context in which a weight is in memory, where some rest elsewhere; one is asked for at a time.
    Raises:
        OSError: the folder cannot be written, or the disk is full.
    Memory: one tensor where the weights are not on the CPU, else nothing.
    """
    Path(folder).mkdir(parents=True, exist_ok=True)
    names, parameters = hf_names(model.config), dict(model.named_parameters())
    weights_of = {names[name]: parameter for name, parameter in parameters.items()}
    scales = {names[name] + SCALE: scale_of(parameter) for name, parameter in parameters.items() if is_int8(parameter)}

    @contextmanager
    def here(name: str) -> Iterator[Tensor]:
        with held([weights_of[name]] if name in weights_of else []):
            yield (weights_of[name] if name in weights_of else scales[name]).detach()

    tensors: dict[str, Tensor] = {name: weight.detach() for name, weight in weights_of.items()}
    if scales:
        write_safetensors({**tensors, **scales}, Path(folder) / INT8_FILE, here)
    else:
        whole = sum(tensor.nbytes for tensor in tensors.values())
        write_shards(tensors, Path(folder), shard_bytes or whole, here)
    write_config(model.config, folder, model.embedding.dtype)
