"""Learning rates for finetuning, with and without pretraining: `python -m benchmarks.learning.rates NAME BASE [...]`.

    NAME BASE             of the section that is written, and the folder of a pretrained model
    --train_file=FILE --validation_file=FILE      prompts and responses
    --rates=1e-3,3e-3,1e-2 --steps=300 --rows=16  of each run; the rates besides `auto`, which always runs
    --metrics=char_bleu --eval_rows=500           scores of greedy answers to so many rows, besides their loss
    --scratch=True        the same from random weights of the same shape too, with the same tokenizer
    --FLAG=VALUE          the others go to `train`

Every run is the command `train` on the same rows in the same order; only start and rate differ. Runs that ended are noted
below data/cache/rates, and not run again.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.parts import children
from benchmarks.parts.one_system import peer_shape
from benchmarks.parts.results import ROOT, markdown, write_section
from benchmarks.parts.rows import read_rows
from benchmarks.parts.watched import last_event
from model.formats.shape_file import read_config
from settings.fields import AUTO

CACHE = ROOT / "data" / "cache" / "rates"
OWN = {
    "rates": "1e-3,3e-3,1e-2",
    "steps": "300",
    "rows": "16",
    "metrics": "char_bleu",
    "eval_rows": "500",
    "scratch": "True",
}


def run(
    base: Path, from_base: bool, rate: str, options: dict[str, str], flags: list[str], work: Path
) -> dict[str, Any]:
    """One training run; its rate, and what its last evaluation found."""
    name = f"{'base' if from_base else 'scratch'}-{rate}"
    noted = work / f"{name}.json"
    if noted.is_file():
        return dict(json.loads(noted.read_text(encoding="utf8")))
    start = [f"--finetune_from={base}"]
    if not from_base:  # random weights in the same shape
        start = ["--finetune_from=none", f"--tokenizer_dir={base}", *children.words_of(peer_shape(read_config(base)))]
    words = [
        str(ROOT / "train_low_mem.py"), "train", "--is_finetune=True", *start, f"--run_name={name}", f"--learning_rate={rate}",
        f"--max_steps={options['steps']}", f"--eval_steps={options['steps']}", f"--effective_batch_size={options['rows']}",
        f"--metrics={options['metrics']}", f"--eval_rows={options['eval_rows']}", f"--eval_generate_rows={options['eval_rows']}",
        "--overwrite=True", "--sample_rows=0", f"--output_dir={work / 'runs'}", f"--log_dir={work / 'logs'}", *flags,
    ]  # fmt: skip
    children.must_run(words)
    events = read_rows(work / "logs" / name / "metrics.jsonl")
    highest = max(event["learning_rate"] for event in events if event["event"] == "step")
    last = last_event(events, "eval")
    scores = {key: last[key] for key in ("loss", *options["metrics"].split(","))}
    found = {"from": "base" if from_base else "random weights", "rate": rate, "highest": highest, **scores}
    noted.write_text(json.dumps(found), encoding="utf8")
    return found


def main(arguments: list[str]) -> None:
    """Run what is not noted yet, and write the section."""
    names, options, others = children.options_and_flags(arguments, OWN)
    if len(names) != 2:
        sys.exit(__doc__)
    flags = children.words_of(others)
    base, work = Path(names[1]).absolute(), CACHE / names[0]
    work.mkdir(parents=True, exist_ok=True)
    starts = (True, False) if options["scratch"] == "True" else (True,)
    found = []
    for from_base in starts:
        for rate in (AUTO, *options["rates"].split(",")):
            found.append(run(base, from_base, rate, options, flags, work))
            print(found[-1], flush=True)
    keys = ["loss", *options["metrics"].split(",")]
    rows = [
        [one["from"], f"{one['highest']:.0e}" + (" (default)" if one["rate"] == AUTO else ""), f"{one['loss']:.3f}",
         *(f"{one[key]:.1f}" for key in keys[1:])] for one in found
    ]  # fmt: skip
    told = f"{options['steps']} steps of {options['rows']} rows; scores in percent of greedy answers to {options['eval_rows']} rows."
    write_section(
        f"rates-{names[0]}",
        f"Finetuning learning rates: {names[0]}",
        f"{told}\n\n{markdown(['from', 'peak rate', *keys], rows)}",
        found,
    )


if __name__ == "__main__":
    main(sys.argv[1:])
