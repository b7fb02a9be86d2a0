"""An export checked against the model: fixed ids through both, outputs compared.

CTranslate2 and ONNX run here; a GGUF is read back with llama.cpp's own reader, which runs nothing.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from commands.convert import fixed_ids, probe_logits
from commands.exporting.ctranslate2_folder import distinct
from commands.exporting.gguf_file import gguf_name
from commands.exporting.onnx_files import DECODER_FILE, ENCODER_FILE
from commands.exporting.vocabulary import Vocabulary
from model.shapes import weights
from model.t5 import T5
from settings.errors import UserError
from settings.program import needs


def check_onnx(model: T5, vocabulary: Vocabulary, folder: Path) -> float | None:
    """Largest distance of a logit, as a share of the largest; None where onnxruntime is not installed."""
    if find_spec("onnxruntime") is None:
        return None
    runtime = needs("onnxruntime", "--format = onnx")
    expected = probe_logits(model).numpy()
    sources, steps = fixed_ids(model.config)
    rows = [torch.tensor(row) for row in sources]
    ids = pad_sequence(rows, batch_first=True).numpy()
    mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True).numpy()
    providers = ["CPUExecutionProvider"]
    encoder = runtime.InferenceSession(str(folder / ENCODER_FILE), providers=providers)
    (states,) = encoder.run(None, {"input_ids": ids, "attention_mask": mask})
    del encoder
    decoder = runtime.InferenceSession(str(folder / DECODER_FILE), providers=providers)
    answers = torch.stack(steps, dim=1).numpy()
    inputs = {"input_ids": answers, "encoder_hidden_states": states, "encoder_attention_mask": mask}
    (logits,) = decoder.run(None, inputs)
    return float(np.abs(logits - expected).max() / np.abs(expected).max())


def check_ctranslate2(model: T5, vocabulary: Vocabulary, folder: Path) -> float | None:
    """Largest distance of a log-probability of fixed answers, as a share of the largest."""
    ctranslate2 = needs("ctranslate2", "--format = ctranslate2")
    sources, steps = fixed_ids(model.config)
    answers = torch.stack(steps[1:], dim=1)
    scores = torch.log_softmax(probe_logits(model), dim=-1)[:, :-1].gather(-1, answers[..., None])[..., 0].numpy()
    translator = ctranslate2.Translator(str(folder), device="cpu", intra_threads=1, compute_type="float32")
    names = distinct(vocabulary.texts)
    prompts, targets = ([[names[number] for number in row] for row in rows] for rows in (sources, answers.tolist()))
    results = translator.score_batch(prompts, targets)
    log_probabilities = np.array([result.log_probs[: answers.shape[1]] for result in results])
    return float(np.abs(log_probabilities - scores).max() / np.abs(scores).max())


def check_gguf(model: T5, vocabulary: Vocabulary, folder: Path) -> float | None:
    """Read the file back: every tensor is there under llama.cpp's name, in its shape, and so is every piece; None.

    Raises:
        UserError: something is missing, as after a disk that was full.
    """
    gguf = needs("gguf", "--format = gguf")
    (path,) = folder.glob("*.gguf")
    reader = gguf.GGUFReader(str(path))
    shapes = {tensor.name: tuple(reversed(tensor.shape.tolist())) for tensor in reader.tensors}
    expected = {gguf_name(weight): weight.shape for weight in weights(model.config)}
    if shapes != expected or len(reader.fields["tokenizer.ggml.tokens"].data) != len(vocabulary.pieces):
        raise UserError("--output = {path}, does not hold what was written; check the disk", path=path)
    return None
