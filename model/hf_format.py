"""A model to and from a Hugging Face folder.

Two translations: names of tensors, and `config.json`, which `formats.shape_file` reads. Tensors pass one by one, so
that neither way needs more memory than the model and a piece of one tensor. Read are T5 1.0, T5 1.1, Flan, mT5, UMT5,
ByT5 and CodeT5, in one file or in shards; what is written loads in `AutoModelForSeq2SeqLM` as it is.

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

from model.formats.answering import GENERATION_FILE
from model.formats.headers import INT8_FILE, SCALE, WEIGHTS_FILE, read_json
from model.formats.heads import EMBEDDING, class_of, labels_in_config
from model.formats.pickle_files import DTYPES
from model.formats.sentence_transformers import DENSE_FOLDER, MATRIX, STORED_MATRIX, write_modules
from model.formats.shape_file import (
    CONFIG_FILE,
    EMBEDDING_COPIES,
    embedding_name,
    family_of,
    listed,
    misfits,
    new_head,
    published_names,
    shape_from,
    stored_names,
)
from model.formats.tensor_files import TensorFolder, write_safetensors
from model.quantization import QUANTIZED, fill_quantized, is_int4, is_int8, scale_of
from model.shapes import EMBEDDING_HEAD, LABEL_HEAD
from model.t5 import T5, Filling, WithWeights, in_memory, in_place
from settings.declared import T5ModelConfig
from settings.errors import UserError, refuse
from support.language import join, say

_FREE_FIELDS = {"dropout_rate", "initializer_factor"}  # A run chooses them, not a checkpoint.


def stored_dtype(folder: str | Path, allow_pickle: bool = False) -> torch.dtype:
    """What the matrices of a folder are stored as, read from the tensors themselves; float32 where that differs, as in
    the fp16 folders of transformers, which keeps `wo` in fp32.

    Raises:
        UserError: no readable weights.
    """
    checkpoint = TensorFolder(folder, allow_pickle)
    if embedding_name(checkpoint) not in checkpoint.names:
        raise UserError(
            "{folder}, holds no {embedding}; give the folder of a T5 model", folder=folder, embedding=EMBEDDING
        )
    return DTYPES.get(checkpoint.matrix_dtype(), torch.float32)


def write_config(config: T5ModelConfig, folder: str | Path, dtype: torch.dtype = torch.float32) -> None:
    """Write `config.json` and, for a model that writes text, `generation_config.json` into an existing folder.

    Args:
        dtype: of the weights, which transformers then loads them as.
    Raises:
        OSError: the folder cannot be written.
    """
    published = class_of(config)
    family = "umt5" if config.bias_in_every_layer else "t5"
    values = dataclasses.asdict(config)
    for name in ("labels", "bias_in_every_layer", *published.unwritten):
        del values[name]
    tokens = {
        "decoder_start_token_id": config.start_token_id,
        "eos_token_id": config.eos_token_id,
        "pad_token_id": config.pad_token_id,
    }
    content = {
        "architectures": [family.upper() + published.ending],
        "model_type": family,
        "is_encoder_decoder": config.num_decoder_layers > 0,
        "dtype": str(dtype).removeprefix("torch."),
        **values,
        **(labels_in_config(config) if config.num_labels else {}),
        **tokens,
    }
    _write_json(Path(folder) / CONFIG_FILE, content)
    if published.writes_text:
        _write_json(Path(folder) / GENERATION_FILE, tokens)


def _write_json(path: Path, content: Mapping[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf8")


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
        dtype: what the weights become; norms and bias tables are fp32 always. int8, int4: frozen, see
            `model.quantization`.
        device: where they go.
        expect: the shape that the checkpoint must have; the model keeps this configuration. None: any. Its vocabulary
            may be larger: the tables then get new rows.
        allocate: gives a model on "meta" its weights, not filled yet; None: all lie in memory on `device`.
        allow_pickle: whether pickled weights are read (by torch's weights-only loader) where there are no others.
        filling: a context around the filling of each weight, where `allocate` has given it a place outside of memory.
        seed: of a head over labels that `expect` has and the folder has not, or has for other labels, and of new rows
            of the tables.
        pieces: of each new token, its tokens before: it begins as their mean, or at random where there are none.
        maps: on a CPU, whether weights that are stored in their dtype stay in their file, mapped: of models that do not
            learn.
    Raises:
        UserError: missing, broken or foreign files; another shape than expected.
    Memory: the model, and a chunk of one tensor (4 MiB); what is mapped is no anonymous memory.
    """
    checkpoint = TensorFolder(folder, allow_pickle)
    path = Path(folder) / CONFIG_FILE
    raw = read_json(path)
    config = shape_from(path, raw, checkpoint)
    expect = expect or config
    _refuse_another_shape(folder, config, expect)
    # The tensors are compared with the shape before memory is taken for it.
    sources = _sources(checkpoint, dataclasses.replace(expect, vocab_size=config.vocab_size))
    pieces = pieces or dict.fromkeys(range(config.vocab_size, expect.vocab_size), ())
    for table in {"embedding", "head"} & sources.keys() if pieces else ():
        checkpoint.replace_rows(sources[table], min(pieces), _new_rows(checkpoint, sources[table], pieces, seed))
    is_quantized = dtype in QUANTIZED
    model = T5(expect, "meta" if allocate or is_quantized else device, torch.float32 if is_quantized else dtype)
    if allocate is not None:
        allocate(model)
    with torch.no_grad():
        if new_head(checkpoint, expect) or not expect.has_labels_of(config):
            for name, head in {LABEL_HEAD: model.label_head, EMBEDDING_HEAD: model.embedding_head}.items():
                sources = {weight: source for weight, source in sources.items() if not weight.startswith(f"{name}.")}
                if is_quantized and head is not None:
                    # `to_empty` would do this too, and import sympy: 35 MB.
                    head._apply(lambda weight: torch.empty(weight.shape, device=device))
                model.initialise(seed, only=f"{name}.")
        if is_quantized:
            chunks = {name: partial(checkpoint.chunks, source) for name, source in sources.items()}
            fill_quantized(model, chunks, dtype, device, filling)
        else:
            _fill(model, checkpoint, sources, filling, maps)
        # A UMT5 as published was trained without scaled outputs; our own folders say what they are.
        scaling = (family_of(raw), raw.get("tie_word_embeddings"), raw.get("scale_decoder_outputs"))
        if scaling == ("umt5", False, None) and class_of(expect).writes_text:
            model.decoder.final_norm.weight.mul_(config.d_model**0.5)
    return model.eval()


def _refuse_another_shape(folder: str | Path, config: T5ModelConfig, expect: T5ModelConfig) -> None:
    """Raise where a checkpoint differs from what is expected in more than a run may choose."""
    own = {**dataclasses.asdict(config), "vocab_size": max(config.vocab_size, expect.vocab_size)}
    expected = dataclasses.asdict(expect)
    different: list[str] = [
        say("{name} is {value} and not {other_value}", name=name, value=value, other_value=expected[name])
        for name, value in sorted(own.items() - expected.items())
        if name not in _FREE_FIELDS.union(class_of(expect).free)
    ]
    if different:
        raise UserError(
            "{folder}, is a checkpoint of a different shape: {shown}; give the model that it was made with",
            folder=folder,
            shown=join(", ", different),
        )


def _fill(model: T5, checkpoint: TensorFolder, sources: Mapping[str, str], filling: Filling, maps: bool) -> None:
    for name, source in sources.items():
        parameter = model.get_parameter(name)
        pages = checkpoint.mapped(source, parameter.dtype) if maps else None
        if pages is not None:
            parameter.data = pages
        else:
            with filling(parameter):
                checkpoint.copy_into(source, parameter)


def _new_rows(checkpoint: TensorFolder, name: str, pieces: Mapping[int, Sequence[int]], seed: int) -> Tensor:
    """The first values of new rows of a table, in their order: the mean of each token's pieces, or drawn with the mean
    and deviation of the rows before them, which the pieces are among. Memory: the new rows and those of the pieces.
    """
    count = min(pieces)
    ids = torch.tensor(sorted({piece for each in pieces.values() for piece in each}), dtype=torch.long)
    rows_of_pieces: list[Tensor] = []
    total = torch.zeros(checkpoint.shape(name)[1], dtype=torch.float64)
    square = torch.zeros_like(total)
    start = 0
    for chunk in checkpoint.chunks(name):
        chunk = chunk[: max(0, count - start)].double()
        total += chunk.sum(0)
        square += chunk.square().sum(0)
        rows_of_pieces.append(chunk[ids[(ids >= start) & (ids < start + len(chunk))] - start])
        start += len(chunk)
    mean = total / start
    deviation = (square / start - mean.square()).clamp_(min=0).sqrt_()
    generator = torch.Generator().manual_seed(seed % 2**63)
    rows = mean + deviation * torch.randn(len(pieces), len(mean), generator=generator, dtype=torch.float64)
    sources = torch.cat(rows_of_pieces)
    for row, each in zip(rows, pieces.values(), strict=True):
        if each:
            row.copy_(sources[torch.searchsorted(ids, torch.tensor(each))].mean(0))
    return rows.float()


def _sources(checkpoint: TensorFolder, config: T5ModelConfig) -> dict[str, str]:
    """Our name -> stored name of every parameter; each must be there, in its shape, and nothing else."""
    sources = stored_names(checkpoint, config)
    names = checkpoint.names & set(sources.values())
    refuse(
        [
            *misfits(checkpoint, config),
            *_without_scales(checkpoint, names),
            *_no_numbers(checkpoint, names),
            *_different_copies(checkpoint, sources["embedding"]),
        ]
    )
    return sources


def _without_scales(checkpoint: TensorFolder, names: set[str]) -> Iterator[str]:
    bare = list(filter(checkpoint.lacks_scale, names))
    if bare:
        yield say(
            "{path}, holds int8 weights without their scales ({bare}); copy the folder again",
            path=checkpoint.path,
            bare=listed(bare),
        )


def _no_numbers(checkpoint: TensorFolder, names: set[str]) -> Iterator[str]:
    odd = [name for name in names if not checkpoint.is_number(name)]
    if odd:
        yield say(
            "{path}, holds no floating-point numbers in {odd}; use a complete T5 checkpoint",
            path=checkpoint.path,
            odd=listed(odd),
        )


def _different_copies(checkpoint: TensorFolder, embedding: str) -> Iterator[str]:
    """Encoder and decoder share one embedding, of which transformers has written copies."""
    copies = checkpoint.names & {EMBEDDING, *EMBEDDING_COPIES} - {embedding}
    other = [name for name in copies if not checkpoint.equal(embedding, name)]
    if other:
        yield say(
            "{path}, holds other numbers in {other} than in {embedding}; encoder and decoder share one embedding "
            "here: use a complete T5 checkpoint",
            path=checkpoint.path,
            other=listed(other),
            embedding=embedding,
        )


def save(model: T5, folder: str | Path, with_weights: WithWeights = in_place) -> None:
    """Write a folder that `AutoModelForSeq2SeqLM.from_pretrained` loads: weights in their dtype, and configuration.

    Weights in int8 go into a file of another name, which this program alone loads. Beside a head that gives vectors
    stands what `SentenceTransformer` loads, with the head's matrix.

    The caller makes the change atomic (writes beside, then renames).

    Args:
        with_weights: a context in which a weight is in memory, where some rest elsewhere; one is used at a time.
    Raises:
        OSError: the folder cannot be written, or the disk is full.
    Memory: one tensor where the weights are not on the CPU, else nothing.
    """
    Path(folder).mkdir(parents=True, exist_ok=True)
    config = model.config
    names = published_names(config)
    weights = {names[name]: parameter for name, parameter in model.named_parameters()}
    matrix = weights.pop(MATRIX, None)
    assert not any(map(is_int4, weights.values())), "a base in int4 is made anew from its folder"
    scales = {name + SCALE: scale_of(weight) for name, weight in weights.items() if is_int8(weight)}

    @contextmanager
    def pieces(name: str) -> Iterator[list[Tensor]]:
        with with_weights([weights[name]] if name in weights else []):
            yield [tensors[name].detach()]

    tensors = {**weights, **scales}
    write_safetensors(tensors, Path(folder) / (INT8_FILE if scales else WEIGHTS_FILE), pieces)
    write_config(config, folder, model.embedding.dtype)
    if config.gives_vectors:
        write_modules(config, Path(folder))
    if matrix is not None:
        with with_weights([matrix]):
            write_safetensors({STORED_MATRIX: matrix.detach()}, Path(folder) / DENSE_FOLDER / WEIGHTS_FILE)
