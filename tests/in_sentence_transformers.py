"""What sentence-transformers makes of a folder: python in_sentence_transformers.py JOB.json, by the Python that has it.

The job is a table; `do` says what is done:

    vectors   of queries and documents, by the model in `folder`; it is saved again in `copy`, if that is named
    make      a folder with a pooling, a random matrix of width `dense`, and length 1, around the encoder in `encoder`
    loss      of columns of texts, with its gradients, by the model in `folder`

Arrays go into `arrays`, an .npz file; what is printed is JSON.
"""

import json
import sys
from pathlib import Path

import numpy as np
import sentence_transformers
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import losses, modules

job = json.loads(Path(sys.argv[1]).read_text())
torch.manual_seed(0)
torch.set_num_threads(1)


def loaded(folder):
    return SentenceTransformer(folder, device="cpu", model_kwargs={"dtype": torch.float32})


def vectors():
    model = loaded(job["folder"])
    arrays = {"queries": model.encode_query(job["texts"]), "documents": model.encode_document(job["texts"])}
    np.savez(job["arrays"], **arrays)
    if "copy" in job:
        model.save_pretrained(job["copy"], create_model_card=False)
    return {"prompts": model.prompts, "max_seq_length": model.max_seq_length, "parts": len(model)}


def make():
    transformer = modules.Transformer(job["encoder"], max_seq_length=job["max_seq_length"])
    width = transformer.get_embedding_dimension()
    parts = [transformer, modules.Pooling(width, job["pooling"])]
    if job["dense"]:
        parts.append(modules.Dense(width, job["dense"], bias=False, activation_function=torch.nn.Identity()))
    if job["normalize"]:
        parts.append(modules.Normalize())
    model = SentenceTransformer(modules=parts, device="cpu", prompts=job["prompts"])
    model.save_pretrained(job["folder"], create_model_card=False)
    return {}


def loss():
    model = loaded(job["folder"])
    name, options = job["loss"]
    objective = getattr(losses, name)(model, **options)
    if job.get("sizes"):
        objective = losses.MatryoshkaLoss(model, objective, job["sizes"])
    columns = [model.preprocess(texts) for texts in job["columns"]]
    labels = torch.tensor(job["labels"]) if job["labels"] is not None else None
    value = objective(columns, labels)
    value.backward()
    gradients = {name.partition(".")[2]: weight.grad.numpy() for name, weight in model.named_parameters()}
    np.savez(job["arrays"], **gradients)
    return {"loss": float(value)}


result = {"vectors": vectors, "make": make, "loss": loss}[job["do"]]()
print(json.dumps({"version": sentence_transformers.__version__, **result}))
