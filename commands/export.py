"""A trained model for other programs: written as GGUF, CTranslate2 or ONNX, with a card, and checked there.

An adapter is merged in first. Where the other program's package can run what was written, it does, on the same ids as
here, and the numbers must agree before the folder appears; where it cannot, what was written is read back.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

import torch

from commands.answering import refuse_other_head
from commands.convert import DTYPES, TOLERANCES
from commands.exporting.checking import check_ctranslate2, check_gguf, check_onnx
from commands.exporting.ctranslate2_folder import write_ctranslate2
from commands.exporting.gguf_file import write_gguf
from commands.exporting.onnx_files import write_onnx
from commands.exporting.vocabulary import read_vocabulary
from commands.merge import converting, open_merged
from commands.new_folder import holding_output, keep_generation_settings, new_folder
from data.tokenizers.tokenizer import Tokenizer
from model import hf_format
from model.formats.answering import keep_answer_list
from model.shapes import is_matrix, weight_counts
from model.t5 import T5
from settings.declared import Config
from settings.errors import UserError
from settings.program import python
from support.language import join, say
from support.storage import folder_bytes
from support.units import MIB, format_size
from training.report.card import push_command, write_card
from training.report.progress import Progress
from training.saved_model import find_model

PROGRAM_BYTES = 8 * MIB  # Another program's library takes so much.
SLACK = 1e-3  # Other programs sum in another order, and have tables of GELU.
# By format: what writes a model into a folder, what runs it there or reads it back, and how it is used.
FORMATS: dict[str, tuple[Callable[..., Path], Callable[..., float | None], str]] = {
    "gguf": (write_gguf, check_gguf, 'llama-completion -m {file} -p "Your text"'),
    "ctranslate2": (
        write_ctranslate2,
        check_ctranslate2,
        "{python} -c 'import ctranslate2, sys; ctranslate2.Translator(sys.argv[1])' {folder}",
    ),
    "onnx": (
        write_onnx,
        check_onnx,
        "{python} -c 'import onnxruntime, sys; onnxruntime.InferenceSession(sys.argv[1])' {file}",
    ),
}


@holding_output
def export(config: Config) -> float | None:
    """Write `--model`, an adapter merged in, for the program of `--format` into the folder `--output`.

    Returns:
        the difference of the numbers here and there, as a share of their size; None: nothing here runs the file, it was
        read back.
    Raises:
        UserError: the package is missing, the model is none that the program knows, its numbers come out otherwise
            there, or the folder cannot be written.
    Memory: the model, and for ctranslate2 and the checks once more what they hold.
    """
    form = config.export.format
    if form is None:
        raise UserError(
            "--format = none, is needed: the program to write for; allowed: {formats}", formats=join(", ", FORMATS)
        )
    write, check, use = FORMATS[form]
    folders = find_model(config)
    refuse_other_head(folders, "export")
    # The program that checks what was written holds all weights in fp32.
    beside = 0 if form == "gguf" else PROGRAM_BYTES + 4 * weight_counts(folders.shape)["total"]
    with converting(config.memory.memory_budget, folders.shape, hf_format.stored_dtype(folders.base), beside):
        model = open_merged(folders)
        _cast(model, config.convert.dtype)
        with new_folder(config.answer.output, config.run.overwrite, *folders.folders) as folder:
            Tokenizer.load(folders.tokenizer).save(folder)
            vocabulary = read_vocabulary(folder, model.config.vocab_size)
            file = write(model, vocabulary, folder, folders.top.name)
            if form == "onnx":  # It holds no token ids itself.
                hf_format.write_config(model.config, folder, model.embedding.dtype)
                for layer in reversed(folders.layers):
                    keep_generation_settings(layer, folder)
            keep_answer_list(folder, folders.top, folders.base)
            write_card(folders.top, folder, form)
            difference = check(model, vocabulary, folder)
            allowed = TOLERANCES[model.embedding.dtype] + SLACK
            if difference is not None and not difference <= allowed:
                raise UserError(
                    "--format = {form}, its numbers differ by {difference:.1e} there, allowed: {allowed:.0e}; try "
                    "--dtype=fp32, and report the model's config.json",
                    form=form,
                    difference=difference,
                    allowed=allowed,
                )
    output = Path(str(config.answer.output))
    checked = say("read back and compared, tensor by tensor")
    if difference is not None:
        checked = say("run there: outputs differ by {difference}", difference=f"{difference:.1e}")
    size = format_size(folder_bytes(output))
    progress = Progress(1)
    progress.table(say("exported"), [(say("folder"), f"{output}, {size}"), (say("checked"), checked)])
    typed = {"python": python(), "folder": shlex.quote(str(output)), "file": shlex.quote(str(output / file.name))}
    progress.lines(say("next"), [use.format(**typed), push_command(output)])
    return difference


def _cast(model: T5, dtype: str) -> None:
    """Convert the matrices; norms and bias tables stay fp32.

    Args:
        dtype: the setting of that name.
    Raises:
        UserError: a matrix holds numbers that are too large for it.
    """
    target = DTYPES.get(dtype)
    if target is None:
        return
    for name, parameter in model.named_parameters():
        if is_matrix(name, parameter.shape):
            largest = float(parameter.abs().max())
            if largest > torch.finfo(target).max:
                raise UserError(
                    "--dtype = {named}, cannot hold the {largest:.1e} in {name}; use bf16 or fp32",
                    named=dtype,
                    largest=largest,
                    name=name,
                )
            parameter.data = parameter.data.to(target)
