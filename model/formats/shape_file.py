"""The shape of a Hugging Face folder's model: `config.json`, as far as the tensors beside it agree; no torch.

Two meanings differ between versions of transformers, and are settled here:
- Whether the head is the embedding: in files of version 4 `tie_word_embeddings` says it; from version 5 on the flag is
  always true and a head of its own is simply there, so the tensors say it.
- Whether the decoder's output is scaled by d_model^-0.5: `scale_decoder_outputs` where given (T5 from version 5 on),
  else where `tie_word_embeddings` is not false; an mT5 from version 5 on never. From version 5 on every UMT5 is scaled; so
  a UMT5 that was trained without is read as scaled with a final norm d_model^0.5 larger: the same function.

A `T5EncoderModel` is an encoder (`head` none), a `T5ForTokenClassification` one with a token head, a `T5ForSequenceClassification` an
encoder and decoder with a sequence head over the decoder's last token. transformers has no class for a sequence head over the encoder, nor
for a dense token head: such a folder says `T5EncoderModel` and has the head's tensors beside.

Every key of the file is declared in `settings.published_keys`.

Source: transformers 5.23 and 4.57, models t5, mt5, umt5.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from language import join, say
from model.formats.headers import TensorHeaders, read_json
from model.shapes import DECODER, hf_names, label_head_weights, weight_counts, weights
from settings.consistency import HEADS, REGRESSION, SEQUENCE, TEXT, TOKEN
from settings.declared import T5ModelConfig, settings_by_name
from settings.errors import UserError, refuse
from settings.fields import AUTO, counted, parse
from settings.published_keys import CONFIG, CONFIG_KEYS, GENERATION_KEYS, check_keys

CONFIG_FILE = CONFIG
EMBEDDING, HEAD = "shared.weight", "lm_head.weight"
LABEL_HEADS = ("classifier.", "classification_head.")  # how the names of heads over labels begin
EMBEDDING_COPIES = ("decoder.embed_tokens.weight", "encoder.embed_tokens.weight")
_FAMILY_DEFAULTS: dict[str, dict[str, Any]] = {
    "t5": {"dropout_rate": 0.1},
    "mt5": {
        "decoder_start_token_id": 0, "dropout_rate": 0.1, "vocab_size": 250112, "d_ff": 1024, "num_layers": 8, "num_heads": 6,
        "feed_forward_proj": "gated-gelu",
    },
}  # fmt: skip
_FAMILY_DEFAULTS["umt5"] = _FAMILY_DEFAULTS["mt5"]
_OTHER_NAMES = {  # of transformers, for the same number
    "hidden_size": "d_model", "head_dim": "d_kv", "num_hidden_layers": "num_layers", "num_attention_heads": "num_heads",
}  # fmt: skip
_TANH_GELU = ("gelu_new", "gelu_pytorch_tanh")
# a configuration may speak of more weights than its files have bytes only so far, and so small that the message which
# names each missing tensor costs nothing
LEAST_FILE_SHARE, SMALL_MODEL = 2, 10**6
# written by old versions, used by none
_IGNORED = ("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",)
_BLOCK = re.compile(r"\bblock\.(\d+)\.")


def embedding_name(stored: TensorHeaders) -> str:
    """The name under which the embedding is stored here."""
    return next((name for name in (EMBEDDING, *EMBEDDING_COPIES, HEAD) if name in stored.names), EMBEDDING)


def _is_tied(stored: TensorHeaders, flag: bool, version: int) -> bool:
    """Whether the head is the embedding; where the flag says so, a head of its own must differ to count.

    Version 4 of transformers passes over such a head.
    """
    embedding = embedding_name(stored)
    if HEAD not in stored.names or embedding == HEAD:
        return flag or embedding == HEAD  # where the flag denies it, as in the files of a T5Model, the head is missing
    if flag and 1 <= version <= 4:
        return True
    return flag and stored.equal(embedding, HEAD)


def read_config(folder: str | Path) -> T5ModelConfig:
    """The shape of the model that `model.hf_format.load` would return.

    Raises:
        UserError: no `config.json`, not a T5, or values that no T5 can have (all of them at once); no readable weights.
    """
    path = Path(folder) / CONFIG_FILE
    return shape_from(path, read_json(path), TensorHeaders(folder))


def _family(raw: dict[str, Any]) -> Any:
    names = raw.get("architectures")
    if "model_type" in raw or not isinstance(names, list) or not names:
        return raw.get("model_type")
    name = str(names[0]).lower()
    return next((family for family in ("umt5", "mt5", "t5") if name.startswith(family)), name)


def _feed_forward(raw: dict[str, Any], default: str) -> str:
    """The activation: `feed_forward_proj`, but for what `dense_act_fn` and `is_gated_act` say; its `gelu` is that by tanh."""
    named = str(raw.get("feed_forward_proj", default))
    activation, gated = raw.get("dense_act_fn"), raw.get("is_gated_act")
    is_gated = named.startswith("gated-") if gated is None else bool(gated)
    if activation is None:
        activation = "gelu_new" if named == "gated-gelu" else named.removeprefix("gated-")
    words = {**dict.fromkeys(_TANH_GELU, "gelu"), "gelu": "gelu (exact)", "swish": "silu"}
    found = ("gated-" if is_gated else "") + words.get(str(activation), str(activation))
    if found == named or "feed_forward_proj" not in raw:
        return found
    return say("{named} (dense_act_fn and is_gated_act say {found})", named=named, found=found)


def class_of(config: T5ModelConfig) -> str:
    """The ending of the class of transformers that a model is, behind its family's name."""
    if config.is_text:
        return "ForConditionalGeneration"
    if config.head == SEQUENCE and config.num_decoder_layers:
        return "ForSequenceClassification"
    return "ForTokenClassification" if config.head == TOKEN and not config.has_dense_head else "EncoderModel"


def _head(values: dict[str, Any]) -> dict[str, Any]:
    """The head that a configuration names: by keys that are written here, or by its class."""
    names = values.get("architectures")
    name = str(names[0]) if isinstance(names, list) and names else ""
    classes = {"EncoderModel": "none", "ForTokenClassification": TOKEN, "ForSequenceClassification": SEQUENCE}
    head = values.get("head") or next((head for ending, head in classes.items() if name.endswith(ending)), TEXT)
    if head == TEXT:
        return {"head": TEXT}
    if not name.endswith("ForSequenceClassification"):
        values["num_decoder_layers"] = 0
    return {"head": head, "labels": _labels(values) if head in HEADS else AUTO}


def _labels(values: dict[str, Any]) -> str:
    """The setting `labels`: names of classes as far as they can be told apart, else their number."""
    found, named = values.get("id2label"), list[str]()
    if isinstance(found, dict):  # whose order in the file says nothing
        by_number = sorted(found.items(), key=lambda entry: int(entry[0]) if entry[0].isdecimal() else -1)
        named = [str(name) for _, name in by_number]
    count = len(named) or values.get("num_labels") or 2
    if values.get("problem_type") == REGRESSION or count == 1:
        return REGRESSION
    is_plain = len(set(named)) == len(named) and all(name.strip() == name and "," not in name for name in named)
    if not named or not is_plain or all(name in (f"LABEL_{number}", str(number)) for number, name in enumerate(named)):
        return str(count)
    return ",".join(named)


def shape_from(path: Path, raw: dict[str, Any], stored: TensorHeaders) -> T5ModelConfig:
    """The shape that the content of a `config.json` and the tensors beside it speak of.

    Raises:
        UserError: as `read_config`.
    """
    family = _family(raw)
    if not isinstance(family, str) or family not in _FAMILY_DEFAULTS:
        raise UserError(
            "{path}: model_type = {family}, is not a T5; allowed: {family_defaults}",
            path=path,
            family=family,
            family_defaults=join(", ", _FAMILY_DEFAULTS),
        )
    raw = {name: value for name, value in raw.items() if value is not None}
    problems = check_keys(path, raw, CONFIG_KEYS.keys() - GENERATION_KEYS.keys())
    outputs = raw.get("id2label")
    if raw.get("problem_type") == REGRESSION and isinstance(outputs, dict) and len(outputs) > 1:
        problems.append(
            say(
                "{path}: problem_type = {problem_type}, predicts {count} numbers per text; allowed: one; train a head of "
                "your own",
                path=path,
                problem_type=REGRESSION,
                count=len(outputs),
            )
        )
    for other, name in _OTHER_NAMES.items():
        if raw.setdefault(name, raw.get(other)) != raw.get(other, raw[name]):
            problems.append(
                say(
                    "{path}: {other} = {raw}, is not {name} ({other_raw}); leave one of them",
                    path=path,
                    other=other,
                    raw=raw[other],
                    name=name,
                    other_raw=raw[name],
                )
            )
    raw = {name: value for name, value in raw.items() if value is not None}
    values = {**_FAMILY_DEFAULTS[family], **raw}
    values["feed_forward_proj"] = _feed_forward(raw, values.get("feed_forward_proj", T5ModelConfig.feed_forward_proj))
    values.setdefault("num_decoder_layers", values.get("num_layers", T5ModelConfig.num_layers))
    values.update(_head(values))
    written = re.match(r"\d+", str(raw.get("transformers_version") or ""))
    version = int(written[0]) if written else 0  # of transformers; before version 4 it is not said
    tied_flag = values.get("tie_word_embeddings", family != "mt5" or version >= 5) is not False
    values.setdefault("scale_decoder_outputs", family == "umt5" or (tied_flag and (family == "t5" or version < 5)))
    values.update(tie_word_embeddings=_is_tied(stored, tied_flag, version), bias_in_every_layer=family == "umt5")
    if values["head"] != TEXT:
        # of no meaning without a head over the vocabulary
        values.update(tie_word_embeddings=True, scale_decoder_outputs=True)
    if isinstance(ends := values.get("eos_token_id"), list) and len(set(map(str, ends))) == 1:
        values["eos_token_id"] = ends[0]
    taken: dict[str, Any] = {}
    for member in dataclasses.fields(T5ModelConfig):
        try:
            taken[member.name] = parse(settings_by_name()[member.name][1], values.get(member.name, member.default))
        except ValueError as error:
            problems.append(
                say(
                    "{path}: {name} = {values}, {error}",
                    path=path,
                    name=member.name,
                    values=values[member.name],
                    error=error,
                )
            )
    config = T5ModelConfig(**taken)
    if config.decoder_start_token_id == config.pad_token_id:  # the default has one form, by which shapes are compared
        config = dataclasses.replace(config, decoder_start_token_id=None)
    if max(config.pad_token_id, config.eos_token_id, config.start_token_id) >= config.vocab_size and not problems:
        problems.append(
            say(
                "{path}: vocab_size = {vocab_size}, has no row for pad_token_id ({pad_token_id}), eos_token_id "
                "({eos_token_id}) or decoder_start_token_id ({start_token_id}); use the config.json that belongs to "
                "the tokenizer",
                path=path,
                vocab_size=config.vocab_size,
                pad_token_id=config.pad_token_id,
                eos_token_id=config.eos_token_id,
                start_token_id=config.start_token_id,
            )
        )
    refuse(problems or _beyond_its_tensors(path, config, stored))
    return config


def _beyond_its_tensors(path: Path, config: T5ModelConfig, stored: TensorHeaders) -> list[str]:
    """Find sizes that the tensors beside a configuration cannot have, before anything is made of such a size."""
    problems, names, size = list[str](), len(stored.names), weight_counts(config)["total"]
    if config.num_layers + config.num_decoder_layers > names:
        problems.append(
            say(
                "{path}: num_layers = {num_layers}, num_decoder_layers = {num_decoder_layers}, the files hold "
                "{tensors}, fewer than that; use the config.json that belongs to them",
                path=path,
                num_layers=config.num_layers,
                num_decoder_layers=config.num_decoder_layers,
                tensors=counted(names, "tensor"),
            )
        )
    if size > LEAST_FILE_SHARE * stored.file_bytes + SMALL_MODEL:
        problems.append(
            say(
                "{path}: speaks of {size:,} weights (vocab_size {vocab_size}, d_model {d_model}, d_kv {d_kv}, d_ff "
                "{d_ff}, num_heads {num_heads}), the files hold {file_bytes:,} bytes; use the config.json that "
                "belongs to them",
                path=path,
                size=size,
                vocab_size=config.vocab_size,
                d_model=config.d_model,
                d_kv=config.d_kv,
                d_ff=config.d_ff,
                num_heads=config.num_heads,
                file_bytes=stored.file_bytes,
            )
        )
    return problems


def published_names(config: T5ModelConfig) -> dict[str, str]:
    """Our name -> name in a folder of the model's class, of every weight: a model with a head holds the rest as `transformer`."""
    prefix = "transformer." if class_of(config) in ("ForTokenClassification", "ForSequenceClassification") else ""
    return {
        name: name_there if name_there.startswith(LABEL_HEADS) else prefix + name_there
        for name, name_there in hf_names(config).items()
    }


def stored_names(stored: TensorHeaders, config: T5ModelConfig) -> dict[str, str]:
    """Our name -> stored name of every parameter of a shape."""
    return {**hf_names(config), "embedding": embedding_name(stored)}


def new_head(stored: TensorHeaders, config: T5ModelConfig) -> set[str]:
    """The tensors of a head over labels, where a folder has none, or one of another kind or other labels: they begin at random."""
    shapes = {weight.hf_name: weight.shape for weight in label_head_weights(config)}
    has_it = all(name in stored.names and stored.shape(name) == shape for name, shape in shapes.items())
    return set() if has_it else set(shapes)


def misfits(stored: TensorHeaders, config: T5ModelConfig) -> list[str]:
    """Find what keeps a folder from being a model of this shape, from the headers of its files: tensors that are missing, of
    another shape, or of another model.
    """
    sources, found, problems = stored_names(stored, config), stored.names, list[str]()
    if not config.is_text:  # of a whole T5 an encoder takes its own; another head is left out
        beside = LABEL_HEADS if config.num_decoder_layers else (*LABEL_HEADS, f"{DECODER}.")
        found = {name for name in found if name in sources.values() or not name.startswith(beside)}
    wanted = set(sources.values())
    shapes = {sources[weight.name]: weight.shape for weight in weights(config)}
    fresh = new_head(stored, config)
    wrong = {name: stored.shape(name) for name in wanted & found - fresh if stored.shape(name) != shapes[name]}
    missing = wanted - found - fresh
    if missing and config.num_decoder_layers and not any(name.startswith("decoder.block.") for name in found):
        problems.append(
            say(
                "{path}, has no decoder; name a head for its encoder (--head=sequence or token), or use a complete "
                "T5 checkpoint",
                path=stored.path,
            )
        )
    elif missing:
        problems.append(
            say(
                "{path}, lacks {tensors} of the model ({missing}); use a complete T5 checkpoint",
                path=stored.path,
                tensors=counted(len(missing), "tensor"),
                missing=listed(missing),
            )
        )
    if foreign := found - wanted - {EMBEDDING, HEAD, *EMBEDDING_COPIES, *_IGNORED}:
        problems.append(
            say(
                "{path}, holds {tensors} that its {config_file} has no place for ({foreign})",
                path=stored.path,
                tensors=counted(len(foreign), "tensor"),
                config_file=CONFIG_FILE,
                foreign=listed(foreign),
            )
        )
    if wrong:
        shown = listed(
            say("{name} is {shape} and not {expected}", name=name, shape=list(shape), expected=list(shapes[name]))
            for name, shape in wrong.items()
        )
        problems.append(
            say(
                "{path}, holds tensors of another shape than its {config_file} says: {shown}",
                path=stored.path,
                config_file=CONFIG_FILE,
                shown=shown,
            )
        )
    return problems


def listed(names: Iterable[str]) -> str:
    """All names of tensors; those that differ in the number of their block alone stand once, `block.{0,1,2}`."""
    blocks: dict[str, list[str]] = {}
    for name in names:
        number = _BLOCK.search(name)
        blocks.setdefault(_BLOCK.sub("block.*.", name, count=1), []).extend(number.groups() if number else ())
    shown = []
    for name, numbers in sorted(blocks.items()):
        ordered = ",".join(sorted(numbers, key=int))
        shown.append(name.replace("*", ordered if len(numbers) == 1 else f"{{{ordered}}}", 1))
    return ", ".join(shown)
