"""The notebooks of docs/, made of the cells below: `python docs/make_notebook.py` writes them again.

`notebook.ipynb` is executed and keeps what its cells show. `colab.ipynb` and `kaggle.ipynb` are for machines with a GPU
there and show nothing. A slow test executes all three on the CPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SECONDS = 600  # for one cell

# markdown and code in turn
EXAMPLE = (
    """# A T5 from a notebook

Trains a tiny T5 on generated text, receives its events during training, and inspects the result. Everything is written to a
temporary folder. Open this notebook in the `docs` folder of the repository, with the packages of `requirements.txt`, and
`pandas` and `matplotlib` for the last cells.""",
    """%matplotlib inline
import os
import random
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path("..").resolve()))
os.chdir(tempfile.mkdtemp())

random.seed(0)
animals, places = ["fox", "heron", "otter", "badger"], ["river", "bridge", "meadow", "mill"]
lines = [f"The {random.choice(animals)} sleeps by the {random.choice(places)} until {n % 12 + 1} o'clock." for n in range(400)]
characters = Path("text.txt").write_text("\\n\\n".join(lines))""",
    """## Train

Settings are those of the command line. A *callback* is any function of one event, a dictionary that is also a line of the
run's `metrics.jsonl`. If it returns `"stop"`, the run ends after its step, saved; if `"save"`, it writes a checkpoint.""",
    """from config import load
from trainer_low_mem import LowMemTrainer, plot

config = load("train", {
    "train_file": "text.txt", "run_name": "notebook", "output_dir": "runs", "log_dir": "logs", "cache_dir": "cache",
    "memory_budget": "2G", "d_model": 64, "d_ff": 128, "d_kv": 16, "num_heads": 4, "vocab_size": 512, "max_seq_len": 64,
    "max_steps": 60, "eval_steps": 10, "effective_batch_size": 16, "sample_rows": 1, "quiet": True, "language": "en",
})

def say(event):
    if event["event"] == "eval":
        print(f"step {event['step']:2}: evaluation loss {event['loss']:.2f}")

summary = LowMemTrainer(config, callbacks=[say]).train()""",
    """## Inspect

`summary` holds what was planned and measured. `history()` returns the steps as columns, `history("eval")` the evaluations.""",
    """from support.units import format_size

print("planned", format_size(summary.planned_peak_bytes), "measured", format_size(summary.measured_peak_bytes))
print("loss", round(summary.first_eval_loss, 2), "->", round(summary.best_eval_loss, 2))""",
    "",
    """import pandas

table = pandas.DataFrame(summary.history())
table[["step", "loss", "learning_rate", "tokens", "peak_bytes"]].tail(3)""",
    "",
    "plot(summary)",
    """`plot` also accepts the folder of a run, such as `plot("logs/notebook")`, even while it is still training. The model is a
Hugging Face folder; its `README.md` says how it was made.""",
    """print(Path(summary.model_dir, "README.md").read_text().split("## ")[2])""",
)

COLAB = (
    """# Finetune Flan-T5 on Colab

Choose *Runtime > Change runtime type > T4 GPU*, then *Runtime > Run all*. Checkpoints are written to Google Drive. When the session
ends before the run does, open this notebook again and run all cells: training continues after the last checkpoint.

The first cell has what you may want to change. `DATA` may also be a file on Drive, such as `f"{FOLDER}/pairs.jsonl"`; each line has a
`prompt` and a `response`.""",
    """MODEL = "hf://google/flan-t5-base"  # or -small, -large
DATA = "hf://knkarthick/dialogsum"  # dialogues and their summaries
STEPS = 1000
FOLDER = "/content/drive/MyDrive/frugalt5"
""",
    "",
    """%pip install -q frugalt5""",
    "",
    """from google.colab import drive

drive.mount("/content/drive")""",
    """## Look at the GPU

This shows what the machine offers, what limits it, and what to do about it.""",
    """!python -m frugalt5 doctor""",
    """## Train

The memory budget is what is free on the card, and the plan chooses batch size and checkpointing to stay inside it. The run's folder is
`flan` in `FOLDER`.""",
    """!python -m frugalt5 train --is_finetune=True --is_keep_training=auto --run_name=flan \\
    --finetune_from={MODEL} --train_file={DATA} --source_prefix="summarize: " \\
    --max_seq_len=512 --max_target_len=128 --effective_batch_size=32 --max_steps={STEPS} \\
    --output_dir={FOLDER}""",
    """## Use it

`evaluate` measures on held-out rows. The model stays on Drive; `transformers` loads its folder.""",
    """!python -m frugalt5 evaluate --model={FOLDER}/flan
!python -m frugalt5 generate --model={FOLDER}/flan \\
    --input="Ann: Are you coming on Friday? Ben: Only if Carla drives. Ann: She does." """.rstrip(),
)

KAGGLE = (
    """# Finetune Flan-T5 on Kaggle

In the settings of this notebook, choose the accelerator *GPU T4 x2* and turn *Internet* on. (The current builds of PyTorch have no
kernels for a P100.) One of the two cards is used.

Each checkpoint is uploaded to a private dataset of yours, `KEPT`; the first one creates it. When the session ends before the run does,
set `CONTINUE = True` and run all cells: training continues after the last checkpoint.""",
    """MODEL = "hf://google/flan-t5-base"  # or -small, -large
DATA = "hf://knkarthick/dialogsum"  # dialogues and their summaries; or a file below /kaggle/input
STEPS = 1000
KEPT = "YOUR-NAME/flan-checkpoints"
CONTINUE = False
""",
    "",
    """%pip install -q frugalt5""",
    """## Look at the GPU

This shows what the machine offers, what limits it, and what to do about it.""",
    """!python -m frugalt5 doctor""",
    """## Train

The memory budget is what is free on the card, and the plan chooses batch size and checkpointing to stay inside it. A callback receives
each event of the run; this one uploads the folder of runs after each checkpoint.""",
    """import shutil

import kagglehub
from frugalt5 import LowMemTrainer, load

if CONTINUE:
    shutil.copytree(kagglehub.dataset_download(KEPT), "model_save", dirs_exist_ok=True)


def upload(event):
    if event["event"] == "checkpoint":
        kagglehub.dataset_upload(KEPT, "model_save", version_notes=f"step {event['step']}")


config = load("train", {
    "is_finetune": True, "is_keep_training": "auto", "run_name": "flan", "finetune_from": MODEL, "train_file": DATA,
    "source_prefix": "summarize: ", "max_seq_len": 512, "max_target_len": 128, "effective_batch_size": 32, "max_steps": STEPS,
    "save_steps": max(STEPS // 4, 1), "keep_latest_n_ckp": 1,
})
summary = LowMemTrainer(config, callbacks=[upload]).train()""",
    """## Use it

The model is in `model_save/flan`, which becomes part of the notebook's output when you save a version; `transformers` loads this folder.
Training has left memory of the card reserved in this process, so the first lines free it for the commands.""",
    """import gc

import torch

gc.collect()
torch.cuda.empty_cache()
!python -m frugalt5 evaluate --model=model_save/flan
!python -m frugalt5 generate --model=model_save/flan \\
    --input="Ann: Are you coming on Friday? Ben: Only if Carla drives. Ann: She does." """.rstrip(),
)

NOTEBOOKS = {"notebook": EXAMPLE, "colab": COLAB, "kaggle": KAGGLE}


def notebook(name: str) -> Any:
    """A notebook, not executed."""
    import nbformat

    make = nbformat.v4
    cells = [
        make.new_code_cell(text) if number % 2 else make.new_markdown_cell(text)
        for number, text in enumerate(NOTEBOOKS[name])
        if text
    ]
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number}"
    metadata: dict[str, Any] = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    if name == "colab":
        metadata |= {"accelerator": "GPU", "colab": {"gpuType": "T4"}}
    return make.new_notebook(cells=cells, metadata=metadata)


def execute(made: Any, folder: Path = HERE) -> Any:
    """Run every cell in a fresh kernel, which starts in a folder.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell fails.
    """
    import nbclient

    where = {"metadata": {"path": str(folder)}}
    done = nbclient.NotebookClient(made, timeout=SECONDS, resources=where, coalesce_streams=True).execute()
    for cell in done.cells:
        cell.metadata.pop("execution", None)  # times of day, which change
        if cell.cell_type == "code":
            # without warnings of other packages
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    return done


if __name__ == "__main__":
    import nbformat

    for each in NOTEBOOKS:
        made = notebook(each)
        nbformat.write(execute(made) if each == "notebook" else made, HERE / f"{each}.ipynb")
