"""The README.md of a published model: what it is, its data, plan, measured peak, time and scores.

Written from the run's own files (`settings.json`, `metrics.jsonl`) when a run ends and when a model is exported. Files
are told by name, without their folders. A card that its owner has changed is left alone. Nothing is uploaded here: the
command that would is told.
Source: Hugging Face's model cards, YAML between two lines of dashes, then Markdown.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from common.language import english
from common.storage import read_text, write_text
from common.units import format_size
from data.sources.places import public
from model.formats.heads import class_of
from model.formats.shape_file import read_config
from model.shapes import weight_counts
from settings.declared import T5ModelConfig
from settings.errors import UserError
from settings.fields import AUTO
from settings.tasks import MODEL_HEADS, task_for
from training.report.run_files import METRICS_FILE, OWNER_FILE, RUN_FILE, SETTINGS_FILE, EventReader, read_record
from training.report.wording import duration

CARD_FILE, MARK = "README.md", "<!-- written by FrugalT5; remove this line to keep your own words -->"
# not for others; the last only while the run is alive
OWN_FILES = ("checkpoints/*", RUN_FILE, SETTINGS_FILE, OWNER_FILE)
SHOWN = (
    "objective",
    "max_seq_len",
    "max_target_len",
    "max_steps",
    "effective_batch_size",
    "optimizer",
    "learning_rate",
    "lr_schedule",
    "dropout_rate",
    "lora_rank",
    "mixed_precision",
    "seed",
)
TEMPLATE = """---
library_name: {{ form }}
pipeline_tag: {{ task }}
tags:
- t5
- frugalt5
---
{{ mark }}

# {{ name }}

A T5{{ about }}, trained with FrugalT5. The choice of a licence is up to its owner.
{% if settings %}

## Data

- training: {{ data.train or "the built-in sample: documentation and sources of the Python standard library" }}
- evaluation: {{ data.validation or "one row in a hundred, held out" }}
{% endif %}
{% if training %}

## Training

| | |
|---|---|
{% for name, value in training %}
| {{ name }} | {{ value }} |
{% endfor %}
{% endif %}
{% if best %}

## Scores

On {{ "{:,}".format(best.rows) }} held-out rows{% if best.answered_rows %} (scores of answers: {{ "{:,}".format(best.answered_rows) }}){% endif %}, at step {{ best.step }}\
{% if first_loss is not none %}; loss before training {{ "%.4f" | format(first_loss) }}{% endif %}.

| | |
|---|---|
{% for name, value in best.items() if name not in ("event", "step", "rows", "tokens", "answered_rows") and value is number %}
| {{ name }} | {{ "%.4f" | format(value) }} |
{% endfor %}
{% endif %}

## Use

In this folder:

{% if encoder %}
```python
from transformers import AutoTokenizer, {{ encoder }}

tokenizer, model = AutoTokenizer.from_pretrained("."), {{ encoder }}.from_pretrained(".")
output = model(**tokenizer("Your text", return_tensors="pt"))
print(output.{{ "last_hidden_state" if encoder.endswith("EncoderModel") else "logits" }})
```
{% elif form == "transformers" %}
```python
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

tokenizer, model = AutoTokenizer.from_pretrained("."), AutoModelForSeq2SeqLM.from_pretrained(".")
answer = model.generate(**tokenizer("Your text", return_tensors="pt"), max_new_tokens=64)
print(tokenizer.decode(answer[0], skip_special_tokens=True))
```
{% elif form == "gguf" %}
```
llama-completion -m {{ file }} -p "Your text"
```

In llama.cpp before December 2025 that program is called `llama-cli`.
{% elif form == "ctranslate2" and has_spiece %}
```python
import ctranslate2, sentencepiece

translator = ctranslate2.Translator(".", compute_type="int8")
tokenizer = sentencepiece.SentencePieceProcessor(model_file="spiece.model")
pieces = [*tokenizer.encode("Your text", out_type=str), tokenizer.id_to_piece(tokenizer.eos_id())]
answer = translator.translate_batch([pieces], max_decoding_length=64)[0].hypotheses[0]
print(tokenizer.decode(answer))
```
{% elif form == "ctranslate2" %}
```python
import ctranslate2, tokenizers

translator = ctranslate2.Translator(".", compute_type="int8")
tokenizer = tokenizers.Tokenizer.from_file("tokenizer.json")
pieces = tokenizer.encode("Your text").tokens
answer = translator.translate_batch([pieces], max_decoding_length=64)[0].hypotheses[0]
print(tokenizer.decode([tokenizer.token_to_id(piece) for piece in answer]))
```
{% else %}
```python
import json
import numpy, onnxruntime, tokenizers

config = json.load(open("config.json"))
encoder = onnxruntime.InferenceSession("encoder_model.onnx")
decoder = onnxruntime.InferenceSession("decoder_model.onnx")
tokenizer = tokenizers.Tokenizer.from_file("tokenizer.json")
source = {"input_ids": numpy.array([tokenizer.encode("Your text").ids])}
source["attention_mask"] = numpy.ones_like(source["input_ids"])
(states,) = encoder.run(None, source)
answer = [config["decoder_start_token_id"]]
while len(answer) < 64 and answer[-1] != config["eos_token_id"]:
    inputs = {"input_ids": numpy.array([answer]), "encoder_attention_mask": source["attention_mask"]}
    (logits,) = decoder.run(["logits"], {**inputs, "encoder_hidden_states": states})
    answer.append(int(logits[0, -1].argmax()))
print(tokenizer.decode(answer))
```
{% endif %}
"""


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
    with suppress(FileNotFoundError):
        try:
            if MARK not in read_text(path):
                return False
        except ValueError:  # no text of ours
            return False
    has_spiece = (folder / "spiece.model").is_file() and not (folder / "tokenizer.json").is_file()
    file = next((found.name for found in folder.glob("*.gguf")), "")
    write_text(path, card(model, form, has_spiece, file))
    return True


def push_command(folder: Path, name: str = "") -> str:
    """The command that uploads a folder, for the user to type; without a name, into one of theirs that is named like
    the folder.
    """
    left_out = "".join(f" --exclude '{pattern}'" for pattern in OWN_FILES[:-1] if any(folder.glob(pattern)))
    return f"hf upload {name or f'YOUR_NAME/{shlex.quote(folder.name)}'} {shlex.quote(str(folder))} .{left_out}"


def card(model: Path, form: str = "transformers", has_spiece: bool = False, file: str = "") -> str:
    """The text of a model's card.

    Args:
        has_spiece: whether the tokenizer beside it is `spiece.model` alone. file: with the model, where its format has
            one file.
        model: a run's folder, whose log folder its settings name; of any other folder little is known.
    Memory: one event at a time.
    """
    from jinja2 import Environment  # no run holds it while it trains

    settings = read_record(model / SETTINGS_FILE)
    log = Path(str(settings.get("log_dir", "")), model.name, METRICS_FILE)
    events = _events(log) if settings else {}
    end = events.get("end", {})
    files = {role: str(settings.get(f"{role}_file") or "") for role in ("train", "validation")}
    shape = _shape(model, settings)
    head, encoder = MODEL_HEADS["text"], ""
    if shape is not None:
        head = MODEL_HEADS[shape.head]
        encoder = "" if head.writes_text else ("UMT5" if shape.bias_in_every_layer else "T5") + class_of(shape).ending
    environment = Environment(trim_blocks=True, keep_trailing_newline=True)
    return environment.from_string(TEMPLATE).render(
        form=form,
        mark=MARK,
        name=model.name,
        has_spiece=has_spiece,
        file=file,
        about=_about(shape, settings),
        settings=settings,
        encoder=encoder,
        task=head.hub_name,
        data={role: ", ".join(Path(public(part)).name for part in names.split(",")) for role, names in files.items()},
        training=_training(settings, events),
        first_loss=end.get("first_eval_loss"),
        best=end.get("best_evaluation")
        or events.get("best")
        or events.get("eval"),  # the log may begin after it: on another machine
    )


def _shape(model: Path, settings: Mapping[str, Any]) -> T5ModelConfig | None:
    """The shape of a model; as the run knew it where the folder holds an adapter."""
    fields = {name: settings[name] for name in vars(T5ModelConfig()) if name in settings}
    with suppress(UserError):
        return read_config(model)
    return T5ModelConfig(**fields) if fields else None


def _about(shape: T5ModelConfig | None, settings: Mapping[str, Any]) -> str:
    """Size, kind and base."""
    size = "" if shape is None else f" of {weight_counts(shape)['total']:,} weights"
    if not settings:
        return size
    base = settings.get("finetune_from")
    is_new = base in (None, AUTO)
    kind = "finetuned"
    if not settings.get("is_finetune"):
        task = task_for(str(settings.get("objective")), "text" if shape is None else shape.head)
        kind = task.origin(is_new)
    return f"{size}, {kind}" + ("" if is_new else f" from {Path(str(base)).name}")


def _training(settings: Mapping[str, Any], events: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Settings, memory and time. The steps' time is that of all starts; of the last alone where the log is lost."""
    rows = [(name, settings[name]) for name in SHOWN if settings.get(name) not in (None, AUTO, 0)]
    end, plan, steps = (events.get(name, {}) for name in ("end", "plan", "steps"))
    if plan:
        rows.append(("planned peak", f"{format_size(plan['peak_bytes'])} of {format_size(plan['budget_bytes'])}"))
    if end:
        rows.append(("measured peak", format_size(end["measured_peak_bytes"])))
        label, seconds, speed = "time", end["seconds"], end["tokens_per_second"]
        if steps and steps["seconds"]:
            label = "time" if steps["first"] == 1 else f"time, from step {steps['first']:,} on"
            seconds, speed = steps["seconds"], steps["tokens"] / steps["seconds"]
        if speed:
            rows.append((label, f"{english(duration(seconds))}, {speed:,.0f} tokens/s"))
        rows.append(("steps", end["step"]))
    return rows


def _events(path: Path) -> dict[str, Any]:
    """The last event of each kind, but the first plan; what the steps took; and as `best` the evaluation of the best
    checkpoint.

    Where none was better than the untrained model the last one is published, and no mean.
    """
    found: dict[str, Any] = {}
    with suppress(OSError, KeyError, TypeError):  # none, or written by somebody else: what was found by then is told
        for event in EventReader(path).events():
            kind = event["event"]
            if kind == "step":
                steps = found.setdefault("steps", {"first": event["step"], "seconds": 0.0, "tokens": 0})
                steps["seconds"] += event["seconds"]
                steps["tokens"] += event["tokens"]
            elif kind == "checkpoint" and event["best"]:
                found["best"] = found.get("eval")
            elif not event.get("averaged_checkpoints") and (kind != "plan" or kind not in found):
                found[kind] = event
    return found
