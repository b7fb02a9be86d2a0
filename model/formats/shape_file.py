"""The shape of a Hugging Face folder's model: `config.json`, as far as the tensors beside it agree; no torch.

Two meanings differ between versions of transformers, and are settled here:
- Whether the head is the embedding: in files of version 4 `tie_word_embeddings` says it; from version 5 on the flag is
  always true and a head of its own is simply there, so the tensors say it.
- Whether the decoder's output is scaled by d_model^-0.5: `scale_decoder_outputs` where given (T5 from version 5 on),
  else where `tie_word_embeddings` is not false; an mT5 from version 5 on never. From version 5 on every UMT5 is scaled;
  so a UMT5 that was trained without is read as scaled with a final norm d_model^0.5 larger: the same function.

Which head a class of transformers has stands in `heads`; what a folder of sentence-transformers says of its vectors
stands over `config.json`. Every key of the file is declared in
`settings.published_keys`.

Source: transformers 5.23 and 4.57, models t5, mt5, umt5.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from model.formats.headers import TensorHeaders, read_json
from model.formats.heads import (
    EMBEDDING,
    HEAD,
    LABEL_HEADS,
    architecture,
    class_of,
    head_of,
    num_regressions,
)
from model.formats.sentence_transformers import head_settings
from model.shapes import hf_names, label_head_weights, weight_counts, weights
from settings.declared import T5ModelConfig, settings_by_name
from settings.errors import UserError, collected, refuse
from settings.fields import counted, parse
from settings.published_keys import CONFIG, CONFIG_KEYS, GENERATION_KEYS, check_keys
from support.language import join, say

CONFIG_FILE = CONFIG
EMBEDDING_COPIES = ("decoder.embed_tokens.weight", "encoder.embed_tokens.weight")
_MT5 = {
    "dropout_rate": 0.1,
    "vocab_size": 250112,
    "d_ff": 1024,
    "num_layers": 8,
    "num_heads": 6,
    "feed_forward_proj": "gated-gelu",
}
FAMILIES: dict[str, dict[str, Any]] = {"t5": {"dropout_rate": 0.1}, "mt5": _MT5, "umt5": _MT5}  # their defaults
_OTHER_NAMES = {  # transformers has two names for each of these numbers.
    "hidden_size": "d_model",
    "head_dim": "d_kv",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
}
_ACTIVATIONS = {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "gelu": "gelu (exact)", "swish": "silu"}
# A configuration may speak of more weights than its files have bytes only so far, and so small that the message which
# names each missing tensor costs nothing.
LEAST_FILE_SHARE = 2
SMALL_MODEL = 10**6
# Old versions have written it, and none has used it.
_IGNORED = ("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",)
_BLOCK = re.compile(r"\bblock\.(\d+)\.")


def read_config(folder: str | Path) -> T5ModelConfig:
    """The shape of the model that `model.hf_format.load` would return.

    Raises:
        UserError: no `config.json`, not a T5, or values that no T5 can have (all of them at once); no readable weights.
    """
    path = Path(folder) / CONFIG_FILE
    return shape_from(path, read_json(path), TensorHeaders(folder))


def shape_from(path: Path, raw: Mapping[str, Any], headers: TensorHeaders) -> T5ModelConfig:
    """The shape that the content of a `config.json` and the tensors beside it speak of.

    Raises:
        UserError: as `read_config`.
    """
    family = family_of(raw)
    if family not in tuple(FAMILIES):
        raise UserError(
            "{path}: model_type = {family}, is not a T5; allowed: {family_defaults}",
            path=path,
            family=family,
            family_defaults=join(", ", FAMILIES),
        )
    raw = {name: value for name, value in raw.items() if value is not None}
    problems = [
        *check_keys(path, raw, CONFIG_KEYS.keys() - GENERATION_KEYS.keys()),
        *_too_many_numbers(path, raw),
        *_contradictions(path, raw),
    ]
    with collected(problems):
        raw |= head_settings(path.parent)
    values = _settings(family, {_OTHER_NAMES.get(name, name): value for name, value in raw.items()}, headers)
    parsed: dict[str, Any] = {}
    for member in dataclasses.fields(T5ModelConfig):
        value = values.get(member.name, member.default)
        try:
            parsed[member.name] = parse(settings_by_name()[member.name][1], value)
        except ValueError as error:
            problems.append(
                say("{path}: {name} = {values}, {error}", path=path, name=member.name, values=value, error=error)
            )
    refuse(problems)
    config = T5ModelConfig(**parsed)
    if config.decoder_start_token_id == config.pad_token_id:  # The default has one form, by which shapes are compared.
        config = dataclasses.replace(config, decoder_start_token_id=None)
    refuse([*_ids_without_a_row(path, config), *_beyond_its_tensors(path, config, headers)])
    return config


def family_of(raw: Mapping[str, Any]) -> Any:
    """The family that a `config.json` names: its `model_type`, which the oldest files lack, else by the name of its
    class.
    """
    name = architecture(raw).lower()
    by_class = next((family for family in FAMILIES if name.startswith(family)), name or None)
    return raw.get("model_type", by_class)


# --- the settings that a file speaks of


def _settings(family: str, raw: Mapping[str, Any], headers: TensorHeaders) -> dict[str, Any]:
    """Our settings as a `config.json` of a family gives them, not parsed yet; what is absent has its default."""
    values = {**FAMILIES[family], **raw}
    written = re.match(r"\d+", str(raw.get("transformers_version")))
    version = int(written[0]) if written else 0  # Files of before version 4 of transformers do not say it.
    is_tied = values.get("tie_word_embeddings", family != "mt5" or version >= 5) is not False
    is_scaled = {"t5": is_tied, "mt5": is_tied and version < 5, "umt5": True}
    return {
        "num_decoder_layers": values.get("num_layers", T5ModelConfig.num_layers),
        "scale_decoder_outputs": is_scaled[family],
        **values,
        "eos_token_id": end_token(values.get("eos_token_id", T5ModelConfig.eos_token_id)),
        "feed_forward_proj": _feed_forward(values, raw),
        "tie_word_embeddings": _has_tied_head(headers, is_tied, version),
        "bias_in_every_layer": family == "umt5",
        **head_of(raw),
    }


def end_token(ids: Any) -> Any:
    """The one end token of a file that may list several; the list if they differ."""
    is_one = isinstance(ids, list) and len(set(map(str, ids))) == 1
    return ids[0] if is_one else ids


def _feed_forward(values: Mapping[str, Any], raw: Mapping[str, Any]) -> str:
    """The activation: `feed_forward_proj`, but for what `dense_act_fn` and `is_gated_act` say; its `gelu` is that by
    tanh.
    """
    word = str(values.get("feed_forward_proj", T5ModelConfig.feed_forward_proj))
    activation = str(values.get("dense_act_fn", "gelu_new" if word == "gated-gelu" else word.removeprefix("gated-")))
    is_gated = values.get("is_gated_act", word.startswith("gated-"))
    in_parts = ("gated-" if is_gated else "") + _ACTIVATIONS.get(activation, activation)
    if "feed_forward_proj" not in raw or word == in_parts:
        return in_parts
    return say("{named} (dense_act_fn and is_gated_act say {found})", named=word, found=in_parts)


def _has_tied_head(headers: TensorHeaders, flag: bool, version: int) -> bool:
    """Whether the head is the embedding; where the flag says so, a head of its own must differ to count.

    Version 4 of transformers passes over such a head. Where the flag denies it and no head is there, as in the files of
    a T5Model, the head is missing.
    """
    embedding = embedding_name(headers)
    if embedding == HEAD:
        return True
    if not flag or HEAD not in headers.names or 1 <= version <= 4:
        return flag
    return headers.equal(embedding, HEAD)


# --- what is wrong with them


def _too_many_numbers(path: Path, raw: Mapping[str, Any]) -> Iterator[str]:
    """A head predicts one number for each text."""
    count = num_regressions(raw)
    if count > 1:
        yield say(
            "{path}: problem_type = {problem_type}, predicts {count} numbers per text; allowed: one; train a head of "
            "your own",
            path=path,
            problem_type=raw["problem_type"],
            count=count,
        )


def _contradictions(path: Path, raw: Mapping[str, Any]) -> Iterator[str]:
    """Two names of one size have one value."""
    for other, name in _OTHER_NAMES.items():
        if raw.get(other, raw.get(name)) != raw.get(name, raw.get(other)):
            yield say(
                "{path}: {other} = {raw}, is not {name} ({other_raw}); leave one of them",
                path=path,
                other=other,
                raw=raw[other],
                name=name,
                other_raw=raw[name],
            )


def _ids_without_a_row(path: Path, config: T5ModelConfig) -> Iterator[str]:
    """Every special token has a row of the embedding."""
    if max(config.pad_token_id, config.eos_token_id, config.start_token_id) >= config.vocab_size:
        yield say(
            "{path}: vocab_size = {vocab_size}, has no row for pad_token_id ({pad_token_id}), eos_token_id "
            "({eos_token_id}) or decoder_start_token_id ({start_token_id}); use the config.json that belongs to "
            "the tokenizer",
            path=path,
            vocab_size=config.vocab_size,
            pad_token_id=config.pad_token_id,
            eos_token_id=config.eos_token_id,
            start_token_id=config.start_token_id,
        )


def _beyond_its_tensors(path: Path, config: T5ModelConfig, headers: TensorHeaders) -> Iterator[str]:
    """The files can hold what is spoken of, before anything is made of such a size."""
    count = len(headers.names)
    if config.num_layers + config.num_decoder_layers > count:
        yield say(
            "{path}: num_layers = {num_layers}, num_decoder_layers = {num_decoder_layers}, the files hold "
            "{tensors}, fewer than that; use the config.json that belongs to them",
            path=path,
            num_layers=config.num_layers,
            num_decoder_layers=config.num_decoder_layers,
            tensors=counted(count, "tensor"),
        )
    size = weight_counts(config)["total"]
    if size > LEAST_FILE_SHARE * headers.file_bytes + SMALL_MODEL:
        yield say(
            "{path}: describes {size:,} weights (vocab_size {vocab_size}, d_model {d_model}, d_kv {d_kv}, "
            "d_ff {d_ff}, num_heads {num_heads}), but the files have {file_bytes:,} bytes; use the "
            "config.json that belongs to them",
            path=path,
            size=size,
            vocab_size=config.vocab_size,
            d_model=config.d_model,
            d_kv=config.d_kv,
            d_ff=config.d_ff,
            num_heads=config.num_heads,
            file_bytes=headers.file_bytes,
        )


# --- the tensors of a shape


def published_names(config: T5ModelConfig) -> dict[str, str]:
    """Our name -> name in a folder of the model's class, of every weight: a model with a head holds the rest as
    `transformer`.
    """
    prefix = class_of(config).prefix
    return {
        name: published if published.startswith(LABEL_HEADS) else prefix + published
        for name, published in hf_names(config).items()
    }


def embedding_name(headers: TensorHeaders) -> str:
    """The name under which the embedding is stored here."""
    return next((name for name in (EMBEDDING, *EMBEDDING_COPIES, HEAD) if name in headers.names), EMBEDDING)


def stored_names(headers: TensorHeaders, config: T5ModelConfig) -> dict[str, str]:
    """Our name -> stored name of every parameter of a shape."""
    return {**hf_names(config), "embedding": embedding_name(headers)}


def new_head(headers: TensorHeaders, config: T5ModelConfig) -> set[str]:
    """The tensors of a head over labels, where a folder has none, or one of another kind or other labels: they begin at
    random.
    """
    shapes = {weight.hf_name: weight.shape for weight in label_head_weights(config)}
    stored_shapes = {name: headers.shape(name) for name in shapes.keys() & headers.names}
    return set() if stored_shapes == shapes else set(shapes)


def misfits(headers: TensorHeaders, config: T5ModelConfig) -> list[str]:
    """Find what keeps a folder from being a model of this shape, from the headers of its files: tensors that are
    missing, of another shape, or of another model.
    """
    sources = stored_names(headers, config)
    shapes = {sources[weight.name]: weight.shape for weight in weights(config)}
    new = new_head(headers, config)
    return [
        *_missing(headers, config, shapes.keys() - new),
        *_foreign(headers, config, shapes.keys()),
        *_misshapen(headers, shapes, new),
    ]


def _missing(headers: TensorHeaders, config: T5ModelConfig, names: Iterable[str]) -> Iterator[str]:
    missing = set(names) - headers.names
    if not missing:
        return
    if config.num_decoder_layers and not any(name.startswith("decoder.block.") for name in headers.names):
        yield say(
            "{path}, has no decoder; name a head for its encoder (--head=sequence or token), or use a complete "
            "T5 checkpoint",
            path=headers.path,
        )
    else:
        yield say(
            "{path}, lacks {tensors} of the model ({missing}); use a complete T5 checkpoint",
            path=headers.path,
            tensors=counted(len(missing), "tensor"),
            missing=listed(missing),
        )


def _foreign(headers: TensorHeaders, config: T5ModelConfig, names: Iterable[str]) -> Iterator[str]:
    """Tensors without a place. An encoder takes its own of a whole T5, and a model with another head leaves out that of
    the folder.
    """
    unplaced = headers.names - {*names, EMBEDDING, HEAD, *EMBEDDING_COPIES, *_IGNORED}
    foreign = [name for name in unplaced if not name.startswith(class_of(config).left_out)]
    if foreign:
        yield say(
            "{path}, holds {tensors} that its {config_file} has no place for ({foreign})",
            path=headers.path,
            tensors=counted(len(foreign), "tensor"),
            config_file=CONFIG_FILE,
            foreign=listed(foreign),
        )


def _misshapen(headers: TensorHeaders, shapes: Mapping[str, tuple[int, ...]], new: set[str]) -> Iterator[str]:
    different = [
        say(
            "{name} is {shape} and not {expected}",
            name=name,
            shape=list(headers.shape(name)),
            expected=list(shapes[name]),
        )
        for name in (shapes.keys() & headers.names) - new
        if headers.shape(name) != shapes[name]
    ]
    if different:
        yield say(
            "{path}, holds tensors of another shape than its {config_file} says: {shown}",
            path=headers.path,
            config_file=CONFIG_FILE,
            shown=listed(different),
        )


def listed(names: Iterable[str]) -> str:
    """All names of tensors; those that differ in the number of their block alone stand once, `block.{0,1,2}`."""
    blocks: dict[str, list[str]] = {}
    for name in names:
        blocks.setdefault(_BLOCK.sub("block.*.", name, count=1), []).extend(_BLOCK.findall(name)[:1])
    lines = []
    for name, numbers in sorted(blocks.items()):
        ordered = ",".join(sorted(numbers, key=int))
        lines.append(name.replace("*", ordered if len(numbers) == 1 else f"{{{ordered}}}", 1))
    return ", ".join(lines)
