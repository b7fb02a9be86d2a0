"""A model to and from a Hugging Face folder.

Two translations: names of tensors, and `config.json`, which `formats.shape_file` reads. Tensors pass one by one, so that
neither way needs more memory than the model and a piece of one tensor. Read are T5 1.0, T5 1.1, Flan, mT5, UMT5, ByT5 and
CodeT5, in one file or in shards; what is written loads in `AutoModelForSeq2SeqLM` as it is.

Source: transformers 5.23 and 4.57, models t5, mt5, umt5.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from language import join, say
from model.formats.answering import GENERATION_FILE
from model.formats.headers import INT8_FILE, SCALE, WEIGHTS_FILE, read_json
from model.formats.shape_file import (
    CONFIG_FILE,
    EMBEDDING,
    EMBEDDING_COPIES,
    LABEL_HEADS,
    class_of,
    embedding_name,
    listed,
    misfits,
    new_head,
    published_names,
    shape_from,
    stored_names,
)
from model.formats.tensor_files import TensorFolder, write_safetensors
from model.quantization import QUANTIZED, fill_quantized, is_int4, is_int8, scale_of
from model.shapes import LABEL_HEAD
from model.t5 import T5, Filling, WithWeights, in_memory, in_place
from settings.consistency import REGRESSION, SEQUENCE
from settings.declared import T5ModelConfig
from settings.errors import UserError, refuse
from settings.fields import AUTO

# in config.json, of a model with another head than one over the vocabulary
HEAD_FIELDS = ("head", "pooling", "head_kind")
_FREE_FIELDS = ("dropout_rate", "initializer_factor")  # choices of a training run, not of a checkpoint
# in which an encoder may differ from the checkpoint that it is taken from
_ENCODER_FIELDS = (
    *HEAD_FIELDS, "labels", "num_decoder_layers", "tie_word_embeddings", "scale_decoder_outputs", "decoder_start_token_id",
)  # fmt: skip


def stored_dtype(folder: str | Path, allow_pickle: bool = False) -> torch.dtype:
    """What the matrices of a folder are stored as, read from the tensors themselves; float32 where that differs, as in the
    fp16 folders of transformers, which keeps `wo` in fp32.

    Raises:
        UserError: no readable weights.
    """
    stored = TensorFolder(Path(folder), allow_pickle)
    name = embedding_name(stored)
    if name not in stored.names:
        raise UserError(
            "{folder}, holds no {embedding}; give the folder of a T5 model", folder=folder, embedding=EMBEDDING
        )
    numbers = [
        each for each in stored.names
        if len(stored.shape(each)) == 2 and stored.is_number(each) and not each.startswith(LABEL_HEADS)
    ]  # fmt: skip
    dtypes = {stored.dtype(each) for each in numbers if not each.endswith("relative_attention_bias.weight")}
    return dtypes.pop() if len(dtypes) == 1 else torch.float32


def write_config(config: T5ModelConfig, folder: str | Path, dtype: torch.dtype = torch.float32) -> None:
    """Write `config.json` and `generation_config.json` into an existing folder.

    Args:
        dtype: of the weights, which transformers then loads them as.
    Raises:
        OSError: the folder cannot be written.
    """
    values = dataclasses.asdict(config)
    del values["labels"]
    if config.is_text:
        values = {name: value for name, value in values.items() if name not in HEAD_FIELDS}
    elif config.num_labels:
        names = config.label_names or ("LABEL_0",)
        values |= {
            "pooling": config.head_pooling if config.head == SEQUENCE else AUTO, "head_kind": "dense" if config.has_dense_head else "linear",
            "id2label": dict(enumerate(names)), "label2id": {name: number for number, name in enumerate(names)},
            "problem_type": "single_label_classification" if config.label_names else REGRESSION,
            "classifier_dropout": config.dropout_rate,
        }  # fmt: skip
    family = "umt5" if values.pop("bias_in_every_layer") else "t5"
    tokens = {
        "decoder_start_token_id": config.start_token_id,
        "eos_token_id": config.eos_token_id,
        "pad_token_id": config.pad_token_id,
    }
    about = {
        "architectures": [family.upper() + class_of(config)],
        "model_type": family,
        "is_encoder_decoder": config.num_decoder_layers > 0,
        "dtype": str(dtype).removeprefix("torch."),
    }
    files = {CONFIG_FILE: {**about, **values, **tokens}, **({GENERATION_FILE: tokens} if config.is_text else {})}
    for name, content in files.items():
        (Path(folder) / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf8")


def load(
    folder: str | Path,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    expect: T5ModelConfig | None = None,
    allocate: Callable[[T5], None] | None = None,
    allow_pickle: bool = False,
    filling: Filling = in_memory,
    seed: int = 0,
    pieces: Mapping[int, Sequence[int]] | None = None,
    maps: bool = False,
) -> T5:
    """Read a model from a Hugging Face folder, in evaluation mode.

    Args:
        folder: holds `config.json` and `model.safetensors`, or shards of it with an index.
        dtype: what the weights become; norms and bias tables are fp32 always. int8, int4: frozen, see `model.quantization`.
        device: where they go.
        expect: the shape that the checkpoint must have; the model keeps this configuration. None: any. Its vocabulary may be
            larger: the tables then get new rows.
        allocate: gives a model on "meta" its weights, not filled yet; None: all lie in memory on `device`.
        allow_pickle: whether pickled weights are read (by torch's weights-only loader) where there are no others.
        filling: a context around the filling of each weight, where `allocate` has given it a place outside of memory.
        seed: of a head over labels that `expect` has and the folder has not, or has for other labels, and of new rows of the tables.
        pieces: of each new token, its tokens before: it begins as their mean, or at random where there are none.
        maps: on a CPU, whether weights that are stored in their dtype stay in their file, mapped: of models that do not learn.
    Raises:
        UserError: missing, broken or foreign files; another shape than expected.
    Memory: the model, and a chunk of one tensor (4 MiB); what is mapped is no anonymous memory.
    """
    stored = TensorFolder(Path(folder), allow_pickle)
    path = Path(folder) / CONFIG_FILE
    raw = read_json(path)
    config = shape_from(path, raw, stored)
    if expect is not None:
        free: tuple[str, ...] = _FREE_FIELDS if expect.is_text else (*_FREE_FIELDS, *_ENCODER_FIELDS)
        free += ("vocab_size",) * (expect.vocab_size > config.vocab_size)
        names = [member.name for member in dataclasses.fields(T5ModelConfig) if member.name not in free]
        different = [name for name in names if getattr(config, name) != getattr(expect, name)]
        if different:
            shown = [
                say(
                    "{name} is {value} and not {other_value}",
                    name=name,
                    value=getattr(config, name),
                    other_value=getattr(expect, name),
                )
                for name in different
            ]
            raise UserError(
                "{folder}, is a checkpoint of a different shape: {shown}; give the model that it was made with",
                folder=folder,
                shown=join(", ", shown),
            )
    is_frozen = dtype in QUANTIZED
    as_stored = dataclasses.replace(expect or config, vocab_size=config.vocab_size)
    sources = _match(stored, as_stored)  # before memory is taken for a shape that the tensors lack
    pieces = pieces or dict.fromkeys(range(config.vocab_size, (expect or config).vocab_size), ())
    for name in ("embedding", "head") if pieces else ():
        if name in sources:
            stored.replace_rows(sources[name], min(pieces), _new_rows(stored, sources[name], pieces, seed))
    model = T5(expect or config, "meta" if allocate or is_frozen else device, torch.float32 if is_frozen else dtype)
    if allocate is not None:
        allocate(model)
    with torch.no_grad():
        is_other = config.num_labels > 0 and not model.config.has_labels_of(config)
        if model.label_head is not None and (is_other or new_head(stored, model.config)):
            sources = {name: source for name, source in sources.items() if not name.startswith(f"{LABEL_HEAD}.")}
            if is_frozen:
                # not by `to_empty`, which imports sympy: 35 MB
                model.label_head._apply(lambda weight: torch.empty(weight.shape, device=device))
            model.initialise(seed, only=f"{LABEL_HEAD}.")
        if is_frozen:
            chunks = {name: partial(stored.chunks, source) for name, source in sources.items()}
            fill_quantized(model, chunks, dtype, device, filling)
        for name, source in () if is_frozen else sources.items():
            parameter = model.get_parameter(name)
            if maps and (pages := stored.mapped(source, parameter.dtype)) is not None:
                parameter.data = pages
                continue
            with filling(parameter):
                stored.copy_into(source, parameter)
        # a UMT5 as published was trained without scaled outputs; our own folders say what they are
        is_unscaled = raw.get("tie_word_embeddings") is False and raw.get("scale_decoder_outputs") is None
        if raw.get("model_type") == "umt5" and is_unscaled and model.config.is_text:
            model.decoder.final_norm.weight.mul_(config.d_model**0.5)
    return model.eval()


def _new_rows(stored: TensorFolder, name: str, pieces: Mapping[int, Sequence[int]], seed: int) -> Tensor:
    """The first values of new rows of a table, in their order: the mean of each token's pieces, or drawn with the mean and
    deviation of the rows before them, which the pieces are among. Memory: the new rows and those of the pieces."""
    size, found = min(pieces), list[Tensor]()
    wanted = torch.tensor(sorted({piece for each in pieces.values() for piece in each}), dtype=torch.long)
    total = square = torch.zeros(stored.shape(name)[1], dtype=torch.float64)
    start = 0
    for chunk in stored.chunks(name):
        chunk = chunk[: max(0, size - start)].double()
        total, square = total + chunk.sum(0), square + chunk.square().sum(0)
        found.append(chunk[wanted[(wanted >= start) & (wanted < start + len(chunk))] - start])
        start += len(chunk)
    mean = total / start
    deviation = (square / start - mean.square()).clamp_(min=0).sqrt_()
    generator = torch.Generator().manual_seed(seed % 2**63)
    rows = mean + deviation * torch.randn(len(pieces), len(mean), generator=generator, dtype=torch.float64)
    of_piece, known = dict(zip(wanted.tolist(), range(len(wanted)), strict=True)), torch.cat(found)
    for row, each in zip(rows, pieces.values(), strict=True):
        if each:
            row.copy_(known[[of_piece[piece] for piece in each]].mean(0))
    return rows.float()


def _match(stored: TensorFolder, config: T5ModelConfig) -> dict[str, str]:
    """Our name -> stored name of every parameter; each must be there, in its shape, and nothing else."""
    sources = stored_names(stored, config)
    wanted, found, problems = set(sources.values()), stored.names, misfits(stored, config)
    if bare := [name for name in wanted & found if stored.is_number(name) and stored.lacks_scale(name)]:
        problems.append(
            say(
                "{path}, holds int8 weights without their scales ({bare}); copy the folder again",
                path=stored.path,
                bare=listed(bare),
            )
        )
    if odd := [name for name in wanted & found if not stored.is_number(name)]:
        problems.append(
            say(
                "{path}, holds no floating-point numbers in {odd}; use a complete T5 checkpoint",
                path=stored.path,
                odd=listed(odd),
            )
        )
    embedding = sources["embedding"]
    copies = found & {EMBEDDING, *EMBEDDING_COPIES} - {embedding}
    if other := [name for name in copies if embedding in found and not stored.equal(embedding, name)]:
        problems.append(
            say(
                "{path}, holds other numbers in {other} than in {embedding}; encoder and decoder share one embedding "
                "here: use a complete T5 checkpoint",
                path=stored.path,
                other=listed(other),
                embedding=embedding,
            )
        )
    refuse(problems)
    return sources


def save(model: T5, folder: str | Path, held: WithWeights = in_place) -> None:
    """Write a folder that `AutoModelForSeq2SeqLM.from_pretrained` loads: weights in their dtype, and configuration.

    Weights in int8 go into a file of another name, which this program alone loads.

    The caller makes the change atomic (writes beside, then renames).

    Args:
        held: a context in which a weight is in memory, where some rest elsewhere; one is asked for at a time.
    Raises:
        OSError: the folder cannot be written, or the disk is full.
    Memory: one tensor where the weights are not on the CPU, else nothing.
    """
    Path(folder).mkdir(parents=True, exist_ok=True)
    names, parameters = published_names(model.config), dict(model.named_parameters())
    assert not any(map(is_int4, parameters.values())), "a base in int4 is made anew from its folder"
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
        write_safetensors(tensors, Path(folder) / WEIGHTS_FILE, here)
    write_config(model.config, folder, model.embedding.dtype)
