"""`convert`: a checkpoint of the T5 family into a folder that other libraries load.

Read whatever it is (one file or shards, safetensors or, where allowed, pickles, old configurations, a SentencePiece
tokenizer, a run of this program), written as one plain Hugging Face folder: safetensors, configuration, generation
settings, the tokenizer's files. What was written is loaded again, and both must give the same logits for fixed ids;
only then does the folder appear under its name. Our runs are such folders themselves, so one direction serves both
ways.
"""

from __future__ import annotations

import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from commands.new_folder import (
    copy_companions,
    holding_output,
    names_not_finite,
    new_folder,
    refuse_not_finite,
    refuse_tensors_not_finite,
)
from devices.base import dtype_of, name_of
from engine.blockwise import Blockwise
from engine.weights import weight_store_for
from memory.estimate.precision import COMPUTE_DTYPES, WORDS
from model import hf_format
from model.decoding.decoder import Decoder
from model.formats import adapter_folder
from model.formats.checksums import refuse_damaged
from model.formats.headers import read_json
from model.formats.pickle_files import PickleFile
from model.formats.shape_file import CONFIG_FILE, read_config, shape_from
from model.formats.tensor_files import TensorFolder, write_safetensors
from model.loss import LossSettings
from model.micro_batch import MicroBatch
from model.rows import Rows
from model.t5 import T5
from settings.declared import Config, ConvertConfig, T5ModelConfig
from settings.errors import UserError
from settings.fields import listed
from settings.program import program
from settings.tasks import MODEL_HEADS
from support.language import say
from support.storage import folder_bytes
from support.units import format_size
from training.report.progress import Progress
from training.saved_model import SavedModel, find_model, with_head

DTYPES = {WORDS[name]: dtype_of(name) for name in COMPUTE_DTYPES}
# The largest distance of logits, as a share of their norm, that rounding to a dtype explains; kept dtypes are exact but
# for the order of sums.
TOLERANCES = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 1e-1}
SOURCE_LENGTHS = (24, 9)
STEPS = 6


@dataclass(frozen=True)
class Conversion:
    """What was done.

    Args:
        output: the folder. dtype: of its matrices. difference: of the logits before and after, as a share of their
            norm.
        size: bytes of its files. tokenizer: its number of ids, None where the folder had none.
    """

    output: Path
    dtype: torch.dtype
    difference: float
    size: int
    tokenizer: int | None


@holding_output
def convert(config: Config) -> Conversion | None:
    """Write `--model` as a plain Hugging Face folder `--output`, and show how equal both are.

    Returns:
        what was done; None for an adapter, whose tensors stay as they are.
    Raises:
        UserError: the checkpoint is not usable, its numbers do not survive `--dtype`, or the folder cannot be written.
    Memory:
        the larger of both models, and a chunk of one tensor.
    """
    source = find_model(config).folder
    if (source / adapter_folder.PICKLE_FILE).is_file() and not (source / adapter_folder.WEIGHTS_FILE).is_file():
        _convert_adapter(config.convert, source, config.answer.output, config.run.overwrite)
        return None
    refuse_damaged(source, "model")
    shape = None
    if config.is_on_command_line("head"):  # A head edited in `config.py` is one to train.
        if config.model.head != "none":
            raise UserError(
                "--head = {head}, is not in the source; allowed: none, which takes the encoder; train makes a head",
                head=config.model.head,
            )
        path = source / CONFIG_FILE
        published = shape_from(path, read_json(path), TensorFolder(source, config.convert.allow_pickle))
        shape = with_head(published, config.model, config.is_set)
    with new_folder(config.answer.output, config.run.overwrite, source) as partial:
        dtype, difference = _write_weights(config.convert, shape, source, partial)
        tokenizer = copy_companions(SavedModel.read(source), partial)
    output = Path(str(config.answer.output))
    done = Conversion(output, dtype, difference, folder_bytes(output), tokenizer)
    rows = [
        (say("folder"), f"{done.output}, {format_size(done.size)}"),
        (say("weights"), name_of(done.dtype)),
        (say("logits"), say("differ by {share} of their norm", share=f"{done.difference:.1e}")),
        (
            say("tokenizer"),
            say("none in the source") if done.tokenizer is None else say("{count} ids", count=f"{done.tokenizer:,}"),
        ),
        (say("next"), next_command(read_config(done.output), done.output)),
    ]
    Progress(1).table(say("converted"), rows)
    return done


def next_command(shape: T5ModelConfig, folder: object) -> str:
    """The command that uses a model of this shape."""
    return f"{program()} {MODEL_HEADS[shape.head].commands[0]} --model={shlex.quote(str(folder))} --input='...'"


def _convert_adapter(settings: ConvertConfig, source: Path, output: str | None, overwrite: bool) -> None:
    """Write a pickled adapter of PEFT as safetensors."""
    if not settings.allow_pickle:
        adapter_folder.open_weights(source)  # The error says what to do.
    if settings.dtype != "keep":
        raise UserError(
            "--dtype = {dtype}, is for models, and {source} is an adapter; omit it",
            dtype=settings.dtype,
            source=source,
        )
    with new_folder(output, overwrite, source) as partial:
        pickle = PickleFile(source / adapter_folder.PICKLE_FILE)
        tensors = {name: pickle.get_slice(name)[slice(None)] for name in pickle.keys()}  # noqa: SIM118
        refuse_tensors_not_finite(tensors, source)
        write_safetensors(tensors, partial / adapter_folder.WEIGHTS_FILE)
        shutil.copyfile(source / adapter_folder.CONFIG_FILE, partial / adapter_folder.CONFIG_FILE)
        adapter_folder.read_info(partial)
    merging = f"{program()} merge --adapter={shlex.quote(str(output))} --output=FOLDER"
    Progress(1).table(say("converted"), [(say("folder"), str(output)), (say("next"), merging)])


def _write_weights(
    settings: ConvertConfig, shape: T5ModelConfig | None, source: Path, folder: Path
) -> tuple[torch.dtype, float]:
    """Write model and configuration, read them back, and compare.

    Args:
        shape: that is written; None: the source's own.
    Returns:
        dtype, and the difference of the logits as a share of their norm.
    """
    pickles = settings.allow_pickle
    native = hf_format.stored_dtype(source, pickles)
    if native not in DTYPES.values():
        native = torch.float32
    target = DTYPES.get(settings.dtype, native)
    model = hf_format.load(source, dtype=native, expect=shape, allow_pickle=pickles)
    refuse_not_finite(model, source)
    expected = probe_logits(model)
    if target != native:
        del model
        model = hf_format.load(source, dtype=target, expect=shape, allow_pickle=pickles)
        names = names_not_finite(dict(model.named_parameters()))
        if names:
            text = "--dtype = {named}, cannot hold the numbers in {names}; use bf16 or fp32"
            raise UserError(text, named=settings.dtype, names=listed(names))
    hf_format.save(model, folder)
    del model
    written = probe_logits(hf_format.load(folder, dtype=target))
    difference = relative_difference(written, expected)
    tolerance = TOLERANCES[torch.float32 if target == native else target]
    if not difference <= tolerance:  # a difference that is no number fails as well
        raise UserError(
            "--dtype = {dtype}, changes the logits by {difference:.1e} of their norm, allowed: {tolerance:.0e}; "
            "keep the weights unchanged, or use fp32",
            dtype=settings.dtype,
            difference=difference,
            tolerance=tolerance,
        )
    return target, difference


@torch.no_grad()
def probe_logits(model: T5) -> Tensor:
    """Logits (rows, steps, V) fp32 for fixed ids, or those of a head over labels, or vectors of an embedding head, or
    hidden states; computed in fp32 whatever the weights are stored as.

    Memory: one block in fp32, and the logits.
    """
    weight_store = weight_store_for(model.embedding.dtype, torch.float32)
    sources, targets = fixed_ids(model.config)
    if not MODEL_HEADS[model.config.head].writes_text:
        rows = Rows(SOURCE_LENGTHS)
        ids = torch.tensor([number for source in sources for number in source])
        blockwise = Blockwise(model, 0, weight_store, LossSettings(), 0.0)
        micro_batches = [MicroBatch(ids, ids, ids, rows, rows)]
        outputs = blockwise.encode
        if model.label_head is not None:
            outputs = blockwise.predict
        if model.embedding_head is not None:
            outputs = blockwise.embed
        return outputs(micro_batches)[0]
    decoder = Decoder(model, weight_store.in_compute_dtype, torch.float32)
    decoder.join(sources, STEPS)
    return torch.stack([decoder.step(ids) for ids in targets], dim=1)


def relative_difference(logits: Tensor, expected: Tensor) -> float:
    """The norm of the difference, as a share of the norm of what is expected."""
    return float((logits - expected).norm() / expected.norm())


def fixed_ids(shape: T5ModelConfig) -> tuple[list[list[int]], list[Tensor]]:
    """The same ids for the same vocabulary: sources of two lengths, and the decoder's tokens step by step."""
    generator = torch.Generator().manual_seed(0)
    sources = [
        [*torch.randint(0, shape.vocab_size, (length - 1,), generator=generator).tolist(), shape.eos_token_id]
        for length in SOURCE_LENGTHS
    ]
    count = len(SOURCE_LENGTHS)
    steps = [torch.randint(0, shape.vocab_size, (count,), generator=generator) for _ in range(STEPS - 1)]
    return sources, [torch.full((count,), shape.start_token_id), *steps]
