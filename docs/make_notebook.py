"""How is `docs/notebook.ipynb` made? From the cells below, executed: `python docs/make_notebook.py` writes it again.

A slow test executes it anew, so that what it shows is what happens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
NOTEBOOK = HERE / "notebook.ipynb"
SECONDS = 600  # for one cell

# markdown and code in turn
CELLS = (
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
    """from units import format_size

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


def notebook() -> Any:
    """The notebook, not executed."""
    import nbformat

    make = nbformat.v4
    cells = [
        make.new_code_cell(text) if number % 2 else make.new_markdown_cell(text)
        for number, text in enumerate(CELLS)
        if text
    ]
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number}"
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return make.new_notebook(cells=cells, metadata={"kernelspec": kernel})


def execute(made: Any) -> Any:
    """Run every cell in a fresh kernel.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell fails.
    """
    import nbclient

    where = {"metadata": {"path": str(HERE)}}
    done = nbclient.NotebookClient(made, timeout=SECONDS, resources=where, coalesce_streams=True).execute()
    for cell in done.cells:
        cell.metadata.pop("execution", None)  # times of day, which change
        if cell.cell_type == "code":
            cell.outputs = [
                output for output in cell.outputs if output.get("name") != "stderr"
            ]  # warnings of other packages
    return done


if __name__ == "__main__":
    import nbformat

    nbformat.write(execute(notebook()), NOTEBOOK)
