"""A trained model for other programs: written as GGUF, CTranslate2 or ONNX, with a card, and checked there.

An adapter is merged in first. Where the other program's package can run what was written, it does, on the same ids as
here, and the numbers must agree before the folder appears; where it cannot, what was written is read back.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from commands.answering import refuse_other_head
from commands.convert import DTYPES, TOLERANCES
from commands.exporting.exported import Comparison, Exported
from commands.exporting.limits import decoding_words, prompt_notes, runtime_notes, text_notes
from commands.exporting.tokenizer_json import save_tokenizer
from commands.exporting.vocabulary import read_vocabulary
from commands.merge import converting, open_merged, stays_in_file
from commands.new_folder import holding_output, keep_generation_settings, new_folder
from data.text.templates import Template, template_of
from data.tokenizers.tokenizer import Tokenizer
from model import hf_format
from model.formats.answering import keep_answer_list, read_answer_settings
from model.formats.shape_file import CONFIG_FILE
from model.shapes import is_matrix
from model.t5 import T5
from settings.declared import Config, GenerateConfig
from settings.errors import UserError
from settings.program import full_name, needs, python
from settings.tasks import MODEL_HEADS
from support.language import join, say
from support.storage import folder_bytes
from support.units import format_size
from training.report.card import ModelFacts, push_command, write_card
from training.report.progress import Progress
from training.saved_model import SavedModel, find_model

if TYPE_CHECKING:
    from commands.exporting.held_out import HeldOut  # It needs onnxruntime.

SLACK = 1e-3  # Other programs sum in another order, and have tables of GELU.
# By format: the packages that it needs, and the module that says what it holds (`bytes_beside`), writes it (`write`),
# runs it or reads it back (`check`), and says how it is used (`USE`).
FORMATS = {
    "gguf": (["gguf"], "gguf_file"),
    "ctranslate2": (["ctranslate2"], "ctranslate2_folder"),
    "onnx": (["onnx", "onnxruntime"], "onnx_files"),
    "web": (["onnx", "onnxruntime"], "web_page"),
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
    Memory: the model, which stays in its file where no adapter and no other dtype changes it, and what writing and
        running the format holds.
    """
    form = config.export.format
    if form is None:
        raise UserError(
            "--format = none, is needed: the program to write for; allowed: {formats}", formats=join(", ", FORMATS)
        )
    packages, name = FORMATS[form]
    for package in packages:
        needs(package, f"--format = {form}", install=packages)
    target = import_module(full_name(f"commands.exporting.{name}"))
    quantize = config.export.quantize
    if quantize != "none" and config.is_on_command_line("dtype") and config.convert.dtype not in ("keep", quantize):
        raise UserError(
            "--quantize = {quantize}, contradicts --dtype = {dtype}; omit one of them",
            quantize=quantize,
            dtype=config.convert.dtype,
        )
    folders = find_model(config)
    refuse_other_head(folders, "export")
    prompts = folders.settings_of("query_prompt", "document_prompt") if folders.shape.gives_vectors else {}
    writes_text = MODEL_HEADS[folders.shape.head].writes_text
    template = template_of(config.data, folders.tokenizer) if writes_text else Template()
    prepare_text = folders.run_settings.get("prepare_text", "none")
    settings: dict[str, Any] = {"max_new_tokens": GenerateConfig.max_new_tokens}
    for layer in folders.layers:
        settings |= read_answer_settings(layer)[0]
    decoding = decoding_words(form, settings)
    beside = target.bytes_beside(folders.shape, quantize)
    rows = _rows_to_answer(config, folders)
    if rows is not None:
        beside = max(beside, rows.bytes_beside(folders.shape, quantize))
    flag = "dtype"
    dtype = config.convert.dtype
    if quantize == "fp16" and form in ("gguf", "ctranslate2"):  # There fp16 is the dtype of the whole model.
        flag = "quantize"
        dtype = quantize
    native = hf_format.stored_dtype(folders.base)
    stored = DTYPES.get(dtype, native)
    widest = max(native, stored, key=lambda dtype: dtype.itemsize)
    is_in_file = stays_in_file(folders)
    if is_in_file:  # Each matrix is read from there when it is converted.
        widest = stored
    is_mapped = is_in_file and stored == native
    hints = [] if quantize == "none" else ["--quantize=none"]
    with converting(config.memory.memory_budget, folders.shape, widest, beside, is_mapped, hints):
        model = open_merged(folders)
        _cast(model, dtype, flag)
        with new_folder(config.answer.output, config.run.overwrite, *folders.folders) as folder:
            tokenizer = Tokenizer.load(folders.tokenizer)
            vocabulary = read_vocabulary(tokenizer, folders.tokenizer, model.config.vocab_size)
            ids = save_tokenizer(tokenizer, vocabulary, form, folder)
            exported = Exported(
                model,
                vocabulary,
                folders.top.name,
                quantize,
                config.export.js,
                prepare_text=prepare_text,
                template=template,
                labels_of=folders.base if folders.has_head_of_base else None,
                held_out=rows,
                **prompts,
            )
            file = target.write(exported, folder)
            if (folder / CONFIG_FILE).is_file():  # ONNX holds no token ids itself.
                for layer in reversed(folders.layers):
                    keep_generation_settings(layer, folder)
            keep_answer_list(folder, folders.top, folders.base)
            comparisons = target.check(exported, folder)
            _refuse_different(comparisons, form, TOLERANCES[model.embedding.dtype] + SLACK)
            answered = 0 if rows is None else rows.rows
            facts = ModelFacts(
                folders.shape, folders.run_settings, template, settings["max_new_tokens"], decoding=decoding
            )
            write_card(folders.top, folder, form, [_described(each) for each in comparisons], ids, answered, facts)
    output = Path(str(config.answer.output))
    table: list[tuple[str, str]] = [(say("folder"), f"{output}, {format_size(folder_bytes(output))}")]
    table += [(say("checked, {precision}", precision=each.precision), _result(each)) for each in comparisons]
    if not comparisons:
        table.append((say("checked"), say("read back and compared, tensor by tensor")))
    table += _beside_each_other(comparisons, answered)
    progress = Progress(1)
    table.append((say("tokenizer"), ids))
    progress.table(say("exported"), table)
    notes = prompt_notes(form, prompts.values())
    if writes_text:
        notes = runtime_notes(form, settings, folders.answer_list is not None)
    for note in (*notes, *text_notes(form, template, prepare_text)):
        progress.note(note)
    typed = {
        "python": python(),
        "folder": shlex.quote(str(output)),
        "file": shlex.quote(str(output / file.relative_to(folder))),
        "decoding": " ".join(decoding),
    }
    use = target.USE if writes_text else getattr(target, "ENCODER_USE", target.USE)
    progress.lines(say("next"), [use.format(**typed), push_command(output)])
    return comparisons[0].difference if comparisons else None


def _rows_to_answer(config: Config, folders: SavedModel) -> HeldOut | None:
    """Rows whose answers are compared in each precision: those that are named, or for a copy of less precision those of
    the model's run.

    Raises:
        UserError: they are named where they are not read, or not usable. DoesNotFit: as `held_out`.
    """
    named = [name for name in ("validation_file", "eval_generate_rows") if config.is_set(name)]
    if config.export.format not in ("onnx", "web"):
        if named:
            raise UserError(
                "--{name}, has no effect with --format={form}; omit it", name=named[0], form=config.export.format
            )
        return None
    if named and not MODEL_HEADS[folders.shape.head].writes_text:
        raise UserError(
            "--{name} = {value}, is for models that write text; omit it",
            name=named[0],
            value=config.as_dict()[named[0]],
        )
    if config.export.quantize == "none" and not named:
        return None
    from commands.exporting.held_out import held_out  # It needs onnxruntime.

    return held_out(config, folders)


def _beside_each_other(comparisons: Sequence[Comparison], answered: int) -> Iterator[tuple[str, str]]:
    """What copies of less precision save and cost: bytes of the graphs, and right answers to held-out rows."""
    if len(comparisons) > 1 and comparisons[0].graph_bytes:
        whole, *copies = comparisons
        sizes = [f"{whole.precision} {format_size(whole.graph_bytes)}"]
        for copy in copies:
            share = copy.graph_bytes / whole.graph_bytes
            sizes.append(f"{copy.precision} {format_size(copy.graph_bytes)} ({share:.0%})")
        yield say("graphs"), ", ".join(sizes)
    if answered:
        scores = ", ".join(f"{each.precision} {each.identical:.2f}%" for each in comparisons)
        yield say("answered right"), say("{scores} of {count} held-out rows", scores=scores, count=f"{answered:,}")


def _refuse_different(comparisons: Sequence[Comparison], form: str, allowed: float) -> None:
    """Raise a UserError where numbers differ by more than another order of sums explains; those of less precision only
    where they are not finite.
    """
    for comparison in comparisons:
        limit = math.inf if comparison.is_rounded else allowed
        if not comparison.difference < limit:
            raise UserError(
                "--format = {form}, its numbers differ by {difference:.1e} there in {precision}, allowed: {limit:.0e}; "
                "try --dtype=fp32 and --quantize=none, and report the model's config.json",
                form=form,
                difference=comparison.difference,
                precision=comparison.precision,
                limit=limit,
            )


def _result(comparison: Comparison) -> str:
    difference = f"{comparison.difference:.1e}"
    if comparison.equal_answers is None:
        return say("run there: outputs differ by {difference}", difference=difference)
    return say(
        "run there: outputs differ by {difference}, {equal} of {answers} answers equal",
        difference=difference,
        equal=comparison.equal_answers,
        answers=comparison.answers,
    )


def _described(comparison: Comparison) -> tuple[str, str, str, str, str]:
    """A comparison as cells of the card: precision, size, difference, equal answers, right answers."""
    size = format_size(comparison.graph_bytes) if comparison.graph_bytes else ""
    equal = "" if comparison.equal_answers is None else f"{comparison.equal_answers} of {comparison.answers}"
    right = "" if comparison.identical is None else f"{comparison.identical:.2f}%"
    return comparison.precision, size, f"{comparison.difference:.1e}", equal, right


def _cast(model: T5, dtype: str, flag: str) -> None:
    """Convert the matrices; norms and bias tables stay fp32.

    Args:
        dtype: the value of the setting that `flag` names.
    Raises:
        UserError: a matrix holds numbers that are too large for it.
    """
    target = DTYPES.get(dtype)
    if target is None:
        return
    for name, parameter in model.named_parameters():
        if is_matrix(name, parameter.shape):
            least, most = parameter.detach().aminmax()  # Unlike `abs`, it copies nothing.
            largest = max(-float(least), float(most))
            if largest > torch.finfo(target).max:
                raise UserError(
                    "--{flag} = {named}, cannot hold the {largest:.1e} in {name}; use --dtype=bf16 or --dtype=fp32",
                    flag=flag,
                    named=dtype,
                    largest=largest,
                    name=name,
                )
            parameter.data = parameter.data.to(target)
