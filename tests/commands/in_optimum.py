"""Answers and outputs of an exported folder in Optimum: python in_optimum.py JOB.json, by the Python that has it.

The job: folder; sources with new_tokens, and how many of them are searched with so many
beams, or rows of ids for a head or an encoder. The answer is JSON.
"""

import json
import sys
from importlib.metadata import version
from pathlib import Path

import torch
from optimum import onnxruntime

TOGETHER = 50
job = json.loads(Path(sys.argv[1]).read_text())


def padded(rows):
    tensors = [torch.tensor(ids) for ids in rows]
    masks = [torch.ones_like(row) for row in tensors]
    return {
        "input_ids": torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True),
        "attention_mask": torch.nn.utils.rnn.pad_sequence(masks, batch_first=True),
    }


rows = job["sources"]
result = {"version": version("optimum-onnx"), "answers": [], "searched": [], "outputs": []}
if job.get("new_tokens"):
    model = onnxruntime.ORTModelForSeq2SeqLM.from_pretrained(job["folder"])
    assert model.use_cache
    lengths = {"max_new_tokens": job["new_tokens"]}
    for start in range(0, len(rows), TOGETHER):
        result["answers"] += model.generate(**padded(rows[start : start + TOGETHER]), **lengths).tolist()
    searched = rows[: job["searched"]]
    result["searched"] = model.generate(**padded(searched), **lengths, num_beams=job["beams"]).tolist()
else:
    model = getattr(onnxruntime, job["class"]).from_pretrained(job["folder"], subfolder="onnx", file_name="model.onnx")
    output = model(**padded(rows))
    names = ("sentence_embedding", "last_hidden_state", "logits")
    result["outputs"] = next(output[name] for name in names if name in output).tolist()
print(json.dumps(result))
