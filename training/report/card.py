"""What does a published model say of itself? A README.md: what it is, its data, plan, measured peak, time and scores.

Written from the run's own files (`settings.json`, `metrics.jsonl`) when a run ends and when a model is exported. Files are
told by name, without their folders. A card that its owner has changed is left alone. Nothing is uploaded: the command that
would is told.
Source: Hugging Face's model cards, YAML between two lines of dashes, then Markdown.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from config import PREFERENCES, T5ModelConfig
from data.sources.places import public
from model.formats.shape_file import read_config
from model.shapes import weight_counts
from settings.errors import UserError
from settings.fields import AUTO
from storage import read_text, rename
from training.report.wording import duration
from units import format_size

LOSS = "loss"  # the only measure of which less is better
CARD_FILE, MARK = "README.md", "<!-- written by FrugalT5; remove this line to keep your own words -->"
OWN_FILES = ("checkpoints/*", "run.json", "settings.json")  # not for others
TOLD = (
    "objective", "max_seq_len", "max_target_len", "max_steps", "effective_batch_size", "optimizer", "learning_rate", "lr_schedule",
    "dropout_rate", "lora_rank", "mixed_precision", "seed",
)  # fmt: skip
_USE = {
    "transformers": '''```python
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

tokenizer, model = AutoTokenizer.from_pretrained("FOLDER"), AutoModelForSeq2SeqLM.from_pretrained("FOLDER")
answer = model.generate(**tokenizer("...", return_tensors="pt"), max_new_tokens=64)
print(tokenizer.decode(answer[0], skip_special_tokens=True))
```''',
    "gguf": '```\nllama-cli -m FOLDER/model-*.gguf -p "..."\n```',
    "ctranslate2": '''```python
import ctranslate2, tokenizers

translator = ctranslate2.Translator("FOLDER", compute_type="int8")
tokenizer = tokenizers.Tokenizer.from_file("FOLDER/tokenizer.json")
pieces = tokenizer.encode("...", add_special_tokens=False).tokens
answer = translator.translate_batch([pieces], max_decoding_length=64)[0].hypotheses[0]
print(tokenizer.decode([tokenizer.token_to_id(piece) for piece in answer]))
```''',
    "ctranslate2 with spiece.model": '''```python
import ctranslate2, sentencepiece

translator = ctranslate2.Translator("FOLDER", compute_type="int8")
tokenizer = sentencepiece.SentencePieceProcessor(model_file="FOLDER/spiece.model")
answer = translator.translate_batch([tokenizer.encode("...", out_type=str)], max_decoding_length=64)[0].hypotheses[0]
print(tokenizer.decode(answer))
```''',
    "onnx": '''```python
import onnxruntime

encoder = onnxruntime.InferenceSession("FOLDER/encoder_model.onnx")
decoder = onnxruntime.InferenceSession("FOLDER/decoder_model.onnx")
```

`encoder` takes `input_ids` and `attention_mask`; `decoder` takes `input_ids` (the answer so far, from `decoder_start_token_id` of `config.json` on),
`encoder_hidden_states` and `encoder_attention_mask`, and gives `logits`.''',
}  # fmt: skip


def write_card(model: Path, folder: Path, form: str = "transformers") -> bool:
    """Write the card of a model into a folder, unless its owner has written one.

    Args:
        model: the run, or another folder with a model. folder: gets the card; may be the same. form: what is in it.
    Returns:
        whether it was written.
    Raises:
        OSError: the folder cannot be written.
    """
    path = folder / CARD_FILE
    if path.exists() and MARK not in _words(path):
        return False
    fresh = path.with_name(f".tmp-{CARD_FILE}")  # a name that somebody has made a link is replaced, not written through
    fresh.unlink(missing_ok=True)
    has_spiece = (folder / "spiece.model").is_file() and not (folder / "tokenizer.json").is_file()
    fresh.write_text(card(model, form, has_spiece), encoding="utf8")
    rename(fresh, path)
    return True


def push_command(folder: Path) -> str:
    """The command that uploads a folder, for the user to type: nothing here does."""
    left_out = "".join(f" --exclude '{name}'" for name in OWN_FILES if any(folder.glob(name)))
    return f"hf upload YOUR_NAME/{shlex.quote(folder.name)} {shlex.quote(str(folder))} .{left_out}"


def card(model: Path, form: str = "transformers", has_spiece: bool = False) -> str:
    """The text of a model's card.

    Args:
        has_spiece: whether the tokenizer beside it is `spiece.model` alone.
        model: a run's folder, whose log folder its settings name; of any other folder little is known.
    Memory: one event at a time.
    """
    settings = _read(model / "settings.json")
    log = Path(str(settings.get("log_dir", "")), model.name, "metrics.jsonl")
    events = _events(log, str(settings.get("metric_for_best", LOSS))) if settings else {}
    library = "transformers" if form == "transformers" else form
    use = f"{form} with spiece.model" if has_spiece and form == "ctranslate2" else form
    head = [
        "---",
        f"library_name: {library}",
        "pipeline_tag: text2text-generation",
        "tags:",
        "- t5",
        "- frugalt5",
        "---",
        MARK,
    ]
    parts = [
        "\n".join(head), f"# {model.name}", _about(_shape(model, settings), settings), *_data(settings),
        *_training(settings, events), *_scores(events), f"## Use\n\n{_USE[use].replace('FOLDER', model.name)}",
    ]  # fmt: skip
    return "\n\n".join(parts) + "\n"


def _shape(model: Path, settings: Mapping[str, Any]) -> T5ModelConfig | None:
    """Of the model, or of what an adapter is put on, as its run knew it; None: nobody says."""
    with suppress(UserError):
        return read_config(model)
    fields = {name: settings[name] for name in vars(T5ModelConfig()) if name in settings}
    return T5ModelConfig(**fields) if fields else None


def _about(shape: T5ModelConfig | None, settings: Mapping[str, Any]) -> str:
    size = "" if shape is None else f" of {weight_counts(shape)['total']:,} weights"
    base = settings.get("finetune_from")
    kind = (
        "finetuned"
        if settings.get("is_finetune")
        else "trained with preferences"
        if settings.get("objective") == PREFERENCES
        else "pretrained from scratch"
        if base in (None, AUTO)
        else "trained further"
    )
    told = f", {kind}" + (f" from {Path(str(base)).name}" if base not in (None, AUTO) else "") if settings else ""
    return f"A T5{size}{told}, made with FrugalT5. Its licence is for its owner to name."


def _data(settings: Mapping[str, Any]) -> list[str]:
    if not settings:
        return []
    names = {role: settings.get(f"{role}_file") for role in ("train", "validation")}
    told = {
        role: ", ".join(Path(public(part)).name for part in str(name).split(","))
        for role, name in names.items()
        if name
    }
    lines = [
        f"- training: {told.get('train', 'the built-in sample: documentation and sources of the Python standard library')}"
    ]
    lines.append(f"- evaluation: {told.get('validation', 'one row in a hundred, held out')}")
    return ["## Data\n\n" + "\n".join(lines)]


def _training(settings: Mapping[str, Any], events: Mapping[str, Any]) -> list[str]:
    rows = [(name, settings[name]) for name in TOLD if settings.get(name) not in (None, AUTO, 0)]
    end, plan = events.get("end"), events.get("plan")
    if plan:
        rows.append(("planned peak", f"{format_size(plan['peak_bytes'])} of {format_size(plan['budget_bytes'])}"))
    if end:
        rows += [
            ("measured peak", format_size(end["measured_peak_bytes"])),
            *_time(end, events),
            ("steps", end["step"]),
        ]
    lines = [f"| {name} | {value} |" for name, value in rows]
    return ["## Training\n\n| | |\n|---|---|\n" + "\n".join(lines)] if rows else []


def _time(end: Mapping[str, Any], events: Mapping[str, Any]) -> list[tuple[str, str]]:
    """How long the steps took, over all the times that the run was started; of the last alone where the log is lost."""
    steps = events.get("steps")
    if not steps or not steps["seconds"]:
        speed = end["tokens_per_second"]
        return [("time", f"{duration(end['seconds']).english}, {speed:,.0f} tokens/s")] if speed else []
    label = "time" if steps["first"] == 1 else f"time, from step {steps['first']:,} on"
    return [(label, f"{duration(steps['seconds']).english}, {steps['tokens'] / steps['seconds']:,.0f} tokens/s")]


def _scores(events: Mapping[str, Any]) -> list[str]:
    """The numbers of the evaluation of what is published, and the loss at the beginning."""
    end = events.get("end")
    best = (end or {}).get("best_evaluation") or events.get("best")  # the log may begin after it: on another machine
    if not best:
        return []
    first = end.get("first_eval_loss") if end else None
    known = ("event", "step", "rows", "tokens")
    rows = [
        (name, f"{value:.4f}") for name, value in best.items() if name not in known and isinstance(value, (int, float))
    ]
    lines = [f"| {name} | {value} |" for name, value in rows]
    began = f"; loss before training {first:.4f}" if first is not None else ""
    return [
        f"## Scores\n\nOn {best['rows']:,} held-out rows, at step {best['step']}{began}.\n\n| | |\n|---|---|\n"
        + "\n".join(lines)
    ]


def _words(path: Path) -> str:
    try:
        return read_text(path)
    except (OSError, ValueError):  # no text of ours
        return ""


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(read_text(path))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _events(path: Path, metric: str) -> dict[str, Any]:
    """The first plan, what the steps took, the best evaluation by `metric` and the last end of a run."""
    found: dict[str, Any] = {}
    try:
        with path.open(encoding="utf8") as file:
            for line in file:
                if line.startswith(tuple(f'{{"event": "{name}"' for name in ("plan", "step", "eval", "end"))):
                    _keep(found, json.loads(line), metric)
    except (OSError, ValueError, RecursionError):
        return found
    return found


def _keep(found: dict[str, Any], event: dict[str, Any], metric: str) -> None:
    name = event["event"]
    if name == "plan":
        found.setdefault("plan", event)
    elif name == "step":
        steps = found.setdefault("steps", {"first": event["step"], "seconds": 0.0, "tokens": 0})
        steps["seconds"] += event["seconds"]
        steps["tokens"] += event["tokens"]
    elif name == "end":
        found["end"] = event
    elif event.get(metric) is not None:
        value = -event[metric] if metric == LOSS else event[metric]
        is_best = value > found.get("highest", -math.inf)
        if is_best:
            found |= {"highest": value, "highest_at": event["step"]}
        # where none is better than the untrained model the last is published, and no mean
        if is_best or (found["highest_at"] == 0 and not event.get("averaged_checkpoints")):
            found["best"] = event
