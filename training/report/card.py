"""The README.md of a published model: what it is, its data, plan, measured peak, time and scores.

Written from the run's own files (`settings.json`, `metrics.jsonl`) when a run ends and when a model is exported. Data
files stand there by name, without their folders. A card that its owner has changed is left alone. Nothing is uploaded
here: `push_command` is for the user to type.
Source: Hugging Face's model cards, YAML between two lines of dashes, then Markdown.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data.sources.places import public
from data.text.proteins import PREPARATIONS, example
from data.text.templates import Template
from model.formats.answering import read_answer_settings
from model.formats.checksums import CARD_FILE
from model.formats.heads import class_of
from model.formats.shape_file import read_config
from model.shapes import weight_counts
from settings.declared import GenerateConfig, T5ModelConfig
from settings.errors import UserError
from settings.fields import AUTO
from settings.tasks import MODEL_HEADS, task_for
from support.language import english
from support.storage import read_text, write_text
from support.units import format_size
from training.report.card_usage import USAGE
from training.report.run_files import (
    EVAL_COUNTS,
    METRICS_FILE,
    OWNER_FILE,
    RUN_FILE,
    SETTINGS_FILE,
    EventReader,
    LatestEvents,
    Record,
    read_record,
)
from training.report.wording import duration

MARK = "<!-- written by FrugalT5; remove this line to keep your own words -->"
# These files are not for others; the last is there only while the run is alive.
OWN_FILES = ("checkpoints/*", RUN_FILE, SETTINGS_FILE, OWNER_FILE)
SHOWN_SETTINGS = (
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

A T5{{ size }}{{ origin }}, trained with FrugalT5. The choice of a licence is up to its owner.
{% if vectors %}

It gives a vector of {{ vectors.width }} numbers for each text, by which texts are compared: {{ vectors.parts }}.
{% for name, prompt in vectors.prompts.items() %}
Before each {{ name }} stands the prompt `{{ prompt }}`.
{% endfor %}
{% if vectors.sizes %}
Vectors may be cut to their first {{ vectors.sizes }} numbers, and scaled to length 1 again.
{% endif %}
{% endif %}
{% if data %}

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

On {{ "{:,}".format(best.rows) }} held-out rows\
{% if best.answered_rows %} (scores of answers: {{ "{:,}".format(best.answered_rows) }}){% endif %}\
, at step {{ best.step }}\
{% if first_loss is not none %}; loss before training {{ "%.4f" | format(first_loss) }}{% endif %}.

| | |
|---|---|
{% for name, value in best.items() if name not in counts and value is number %}
| {{ name }} | {{ "%.4f" | format(value) }} |
{% endfor %}
{% endif %}

## Use

In this folder:

{{ usage }}
{% if preparation %}

The model was trained on texts prepared by `--prepare_text={{ preparation.name }}`: \
give `{{ preparation.prepared }}` in place of `{{ preparation.text }}`.
{% endif %}
{% if comparisons %}

## Compared with the model

On fixed ids, when it was exported\
{% if answered_rows %}; answered right: greedily, of {{ "{:,}".format(answered_rows) }} held-out rows, letter by letter{% endif %}:

| precision | graphs | largest difference of an output, as a share of the largest | equal greedy answers | answered right |
|---|---|---|---|---|
{% for precision, size, difference, equal, right in comparisons %}
| {{ precision }} | {{ size or "-" }} | {{ difference }} | {{ equal or "-" }} | {{ right or "-" }} |
{% endfor %}
{% endif %}
{% if ids %}

Tokenizer: {{ ids }}.
{% endif %}
"""


@dataclass(frozen=True)
class ModelFacts:
    """How a model is used, by all folders that say something of it: an adapter's, its base's and that of its run.

    Args:
        shape: with the head of the adapter; None: it is unknown.
        settings: of the run that trained it, or of a folder of sentence-transformers.
        template: by which questions were worded in training.
        new_tokens: of the longest answer.
        decoding: how the program of the format decodes as the model does, in its own words, such as `beam_size=1`.
    """

    shape: T5ModelConfig | None
    settings: Mapping[str, Any] = field(default_factory=dict)
    template: Template = field(default_factory=Template)
    new_tokens: int = GenerateConfig.max_new_tokens
    decoding: Sequence[str] = ()


def write_card(
    model: Path,
    folder: Path,
    form: str = "transformers",
    comparisons: Sequence[tuple[str, str, str, str, str]] = (),
    ids: str = "",
    answered_rows: int = 0,
    facts: ModelFacts | None = None,
) -> bool:
    """Write the card of a model into a folder, unless its owner has written one.

    Args:
        model: the run, or another folder with a model. folder: gets the card; may be the same. form: what is in it.
        comparisons: of an export with the model: precision, size of the graphs, difference, equal answers and right
            ones, in words.
        ids: what its tokenizer gives in other programs. answered_rows: held-out rows that were answered.
        facts: None: what the folder of the model says itself.
    Returns:
        whether it was written.
    Raises:
        OSError: the folder cannot be written.
    """
    path = folder / CARD_FILE
    if has_own_words(folder):
        return False
    has_spiece = (folder / "spiece.model").is_file() and not (folder / "tokenizer.json").is_file()
    file = next((path.name for path in folder.glob("*.gguf")), "")
    write_text(path, card(model, form, has_spiece, file, comparisons, english(ids), answered_rows, facts))
    return True


def has_own_words(folder: Path) -> bool:
    """Whether a folder has a README.md that its owner has written.

    Raises:
        OSError: it cannot be read.
    """
    try:
        return MARK not in read_text(folder / CARD_FILE)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except ValueError:  # It is no text in UTF-8, so it is not ours.
        return True


def push_command(folder: Path, name: str = "") -> str:
    """The command that uploads a folder, for the user to type; without a name, into one of theirs that is named like
    the folder.
    """
    exclusions = "".join(f" --exclude '{pattern}'" for pattern in OWN_FILES[:-1] if any(folder.glob(pattern)))
    return f"hf upload {name or f'YOUR_NAME/{shlex.quote(folder.name)}'} {shlex.quote(str(folder))} .{exclusions}"


def card(
    model: Path,
    form: str = "transformers",
    has_spiece: bool = False,
    file: str = "",
    comparisons: Sequence[tuple[str, str, str, str, str]] = (),
    ids: str = "",
    answered_rows: int = 0,
    facts: ModelFacts | None = None,
) -> str:
    """The text of a model's card.

    Args:
        form, comparisons: as of `write_card`.
        has_spiece: whether the tokenizer beside it is `spiece.model` alone. file: with the model, where its format has
            one file. ids, answered_rows, facts: as of `write_card`.
        model: a run's folder, whose log folder its settings name; of any other folder little is known.
    Memory: one event at a time.
    """
    from jinja2 import Environment  # It is not held in memory while a run trains.

    settings = read_record(model / SETTINGS_FILE)
    if facts is None:
        facts = _facts_of_folder(model, settings)
    shape = facts.shape
    head = MODEL_HEADS["text" if shape is None else shape.head]
    encoder = ""
    if shape is not None and not head.writes_text:
        encoder = ("UMT5" if shape.bias_in_every_layer else "T5") + class_of(shape).ending
    if form == "transformers" and head.has_vectors:
        form = "sentence-transformers"
    run_facts: dict[str, Any] = {"origin": "", "data": {}, "training": [], "first_loss": None, "best": {}}
    if settings:
        run_facts = _of_run(model, settings, "text" if shape is None else shape.head)
    vectors = {} if shape is None or not head.has_vectors else _vectors(shape, facts.settings)
    text = "Your text"
    if head.writes_text:
        before, after = facts.template.text_around_question()
        text = facts.template.prefix + before + text + after
    preparation: dict[str, str] = {}
    prepare_text = facts.settings.get("prepare_text")
    if prepare_text in PREPARATIONS:
        original, prepared = example(prepare_text)
        preparation = {"name": prepare_text, "text": original, "prepared": prepared}
    environment = Environment(trim_blocks=True, keep_trailing_newline=True)
    environment.policies["json.dumps_kwargs"] = {"ensure_ascii": False}
    usage = environment.from_string(USAGE).render(
        form=form,
        encoder=encoder,
        has_spiece=has_spiece,
        file=file,
        head="text" if shape is None else shape.head,
        precision=comparisons[-1][0] if comparisons else "",
        vectors=vectors,
        text=text,
        quoted=shlex.quote(vectors["question"] if vectors else text),
        new_tokens=facts.new_tokens,
        decoding=facts.decoding,
    )
    return environment.from_string(TEMPLATE).render(
        form=form,
        usage=usage,
        vectors=vectors,
        preparation=preparation,
        comparisons=comparisons,
        ids=ids,
        answered_rows=answered_rows,
        mark=MARK,
        name=model.name,
        size="" if shape is None else f" of {weight_counts(shape)['total']:,} weights",
        task=head.hub_name,
        counts=EVAL_COUNTS,
        **run_facts,
    )


def _facts_of_folder(model: Path, settings: Record) -> ModelFacts:
    """What one folder says, of a run that has these settings or of another model."""
    fields = {name: settings[name] for name in vars(T5ModelConfig()) if name in settings}
    shape = T5ModelConfig(**fields) if fields else None
    with suppress(UserError):  # The folder of an adapter holds no shape: there the run's settings have it.
        shape = read_config(model)
    template = Template()
    with suppress(UserError):  # Who reads a broken file says so.
        template = Template.read(model) or template
    answers, _ = read_answer_settings(model)
    return ModelFacts(shape, settings, template, answers.get("max_new_tokens", GenerateConfig.max_new_tokens))


def _vectors(shape: T5ModelConfig, settings: Mapping[str, Any]) -> dict[str, Any]:
    """What the card tells of vectors of texts: how they are made, and what they were trained for."""
    pooling = {"mean": "the mean over its tokens", "first": "its first token", "last": "its end of text"}
    parts = [pooling[shape.head_pooling]]
    if shape.embedding_size:
        parts.append("a matrix")
    if shape.normalize:
        parts.append("length 1")
    prompts = {name: settings.get(f"{name}_prompt") for name in ("query", "document")}
    sizes = str(settings.get("matryoshka_sizes") or "").split(",")
    return {
        "width": shape.vector_size,
        "parts": ", ".join(parts),
        "pooling": shape.head_pooling,
        "normalize": shape.normalize,
        "question": (prompts["query"] or "") + "Your question",
        "text": (prompts["document"] or "") + "A text",
        # How the pipeline of transformers.js calls it; it knows no matrix.
        "js_pooling": {"mean": "mean", "first": "cls", "last": "last_token"}[shape.head_pooling]
        if not shape.embedding_size
        else "",
        "prompts": {name: prompt for name, prompt in prompts.items() if prompt},
        "sizes": " or ".join(size.strip() for size in sizes if size and int(size) < shape.vector_size),
    }


def _of_run(model: Path, settings: Record, head: str) -> dict[str, Any]:
    """What the card tells of a run: its kind and base, data, training, and the scores of what is published."""
    base = settings.get("finetune_from")
    is_new = base in (None, AUTO)
    origin = "finetuned"
    if not settings.get("is_finetune"):
        origin = task_for(str(settings.get("objective")), head).origin(is_new)
    if not is_new:
        origin += f" from {Path(str(base)).name}"
    data = {}
    for role in ("train", "validation"):
        names = str(settings.get(f"{role}_file") or "").split(",")
        data[role] = ", ".join(Path(public(name)).name for name in names)
    training = [(name, settings[name]) for name in SHOWN_SETTINGS if settings.get(name) not in (None, AUTO, 0)]
    latest = LatestEvents()
    best: Record = {}
    first_step = None
    seconds = 0.0
    tokens = 0
    with suppress(OSError, KeyError, TypeError):  # Where somebody else has written the events, those before are shown.
        for event in EventReader(Path(str(settings.get("log_dir", "")), model.name, METRICS_FILE)).events():
            if event["event"] == "step":
                first_step = first_step or event["step"]
                seconds += event["seconds"]
                tokens += event["tokens"]
            elif event["event"] == "checkpoint" and event["best"]:
                best = latest["eval"]
            # The whole start is measured against its first plan.
            is_later_plan = event["event"] == "plan" and latest["plan"]
            if not is_later_plan and not event.get("averaged_checkpoints"):
                latest.add(event)
    end = latest["end"]
    plan = latest["plan"]
    if plan:
        peak = f"{format_size(plan['peak_bytes'])} of {format_size(plan['budget_bytes'])}"
        training.append(("planned peak", peak))
    if end:
        training.append(("measured peak", format_size(end["measured_peak_bytes"])))
    if seconds:
        label = "time" if first_step == 1 else f"time, from step {first_step:,} on"
        training.append((label, f"{english(duration(seconds))}, {tokens / seconds:,.0f} tokens/s"))
    if end:
        training.append(("steps", end["step"]))
    return {
        "origin": f", {origin}",
        "data": data,
        "training": training,
        "first_loss": end.get("first_eval_loss"),
        # Where no checkpoint was better than the untrained model, the last one is published.
        "best": end.get("best_evaluation") or best or latest["eval"],
    }
