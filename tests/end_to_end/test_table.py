"""What the program does for a user, as a table: command lines, and what must be seen once they have run.

A row is one user's afternoon. Paths in braces are data files and runs of the world (`world.py`); `{here}` is the row's
own folder, in which its own runs lie (`{here}/runs/NAME`).
"""

from __future__ import annotations

import json
import shlex
import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from safetensors import safe_open

from tests.end_to_end.running import ROOT, Place, Run
from tests.end_to_end.world import RUNS, SAME, SHAPE, STEPS, World, prompts_of
from tests.ranks import must_succeed

MODEL_FILES = {"config.json", "model.safetensors", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
ADAPTER_FILES = {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"}
ACCELERATE = (sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")


@dataclass(frozen=True)
class Stopped:
    """A command line that gets a signal when it tells of a step."""

    step: int
    number: int
    line: str


@dataclass(frozen=True)
class Launched:
    """A command line that a launcher starts; None: two processes without one."""

    launcher: tuple[str, ...] | None
    line: str


@dataclass
class Seen:
    """What a row has left: its folders, and what each of its commands has printed."""

    world: World
    place: Place
    done: list[Run] = field(default_factory=list)

    def run(self, command: Command) -> None:
        """Run a command line of the row to its end, or what happens between two."""
        if callable(command):
            command(self)
            return
        line = command if isinstance(command, str) else command.line
        name, *flags = self.words(line)
        if isinstance(command, Stopped):
            self.done.append(self.place.stop_at(command.step, command.number, name, *flags))
        elif isinstance(command, str):
            self.done.append(self.place.run(name, *flags))
        elif command.launcher is None:
            must_succeed(ROOT / "train_low_mem.py", 2, *self.place.command(name, *flags)[1:])
        else:
            self.done.append(self.place.run(name, *flags, launcher=command.launcher))

    def words(self, line: str) -> list[str]:
        """The words of a line: `[whole]` stands for the flags of that run of the world, and paths for what is in
        braces.
        """
        words = list[str]()
        for word in shlex.split(line.replace("{here}", str(self.place.folder))):
            is_flags = word.startswith("[") and word[1:-1] in RUNS
            words += self.world.flags(word[1:-1]) if is_flags else [self.world.fill(word)]
        return words

    def folder(self, run: str) -> Path:
        return self.place.runs / run


Check = Callable[[Seen], None]
Command = str | Stopped | Launched | Check


def cut_back(run: str, step: int) -> Check:
    """Make a run one that was killed after a step that it has saved."""

    def change(seen: Seen) -> None:
        folder = seen.folder(run) / "checkpoints"
        for checkpoint in folder.glob("step_*"):
            if int(checkpoint.name.removeprefix("step_")) > step:
                shutil.rmtree(checkpoint)
        for name in ("latest", "best"):
            (folder / name).unlink()
        (folder / "latest").symlink_to(f"step_{step:08}", target_is_directory=True)

    return change


def ends_with(code: int, *parts: str) -> Check:
    """The last command ends with this exit code, and its screen holds these parts."""

    def check(seen: Seen) -> None:
        last = seen.done[-1]
        screen = " ".join((last.stdout + last.stderr).split())
        assert last.returncode == code, screen
        assert "Traceback" not in screen
        for part in parts:
            assert part.replace("{here}", str(seen.place.folder)) in screen

    return check


def learns(run: str, at_least: float = 0.2) -> Check:
    """The loss of the last step is below that of the first."""

    def check(seen: Seen) -> None:
        losses = list(seen.place.losses(run).values())
        assert losses[-1] < losses[0] - at_least

    return check


def same_losses(run: str, undisturbed: str = "whole", tolerance: float = SAME) -> Check:
    """The losses of each step are those of a run of the world."""

    def check(seen: Seen) -> None:
        assert seen.world.difference(seen.place, run, undisturbed) <= tolerance

    return check


def near(run: str, undisturbed: str) -> Check:
    """The losses of each step are within 1e-3 of those of a run of the world.

    With Adafactor the noise of a sum in another order is as large a step as any where a gradient is nothing else.
    """

    def check(seen: Seen) -> None:
        seen.world.path(undisturbed)
        assert seen.place.losses(run) == pytest.approx(seen.world.place.losses(undisturbed), abs=1e-3)

    return check


def bit_for_bit(run: str, undisturbed: str = "whole") -> Check:
    """A run ends as one of the world that nothing has disturbed: losses, evaluations, weights, states of the
    optimizer.
    """

    def check(seen: Seen) -> None:
        same_losses(run, undisturbed, 0.0)(seen)
        theirs = seen.world.place
        evaluations = [
            {event["step"]: event["loss"] for event in place.events(name) if event["event"] == "eval"}
            for place, name in ((seen.place, run), (theirs, undisturbed))
        ]
        assert evaluations[0] == evaluations[1]
        ends = [place.events(name)[-1] for place, name in ((seen.place, run), (theirs, undisturbed))]
        assert ends[0]["first_eval_loss"] == ends[1]["first_eval_loss"]
        for file in ("{}.safetensors", "checkpoints/latest/state/optimizer.safetensors"):
            name = file.format(
                "adapter_model" if (theirs.runs / undisturbed / "adapter_config.json").exists() else "model"
            )
            assert (seen.folder(run) / name).read_bytes() == (theirs.runs / undisturbed / name).read_bytes()

    return check


def was_cut(run: str) -> Check:
    """A run was stopped in its middle and then went on, so that each step stands once and its folder is whole."""

    def check(seen: Seen) -> None:
        stopped = seen.done[0]
        starts = [event["step"] for event in seen.place.events(run) if event["event"] == "start"]
        if stopped.returncode != -signal.SIGKILL:
            assert stopped.returncode == 130, stopped.stdout
            assert f"stopped after step {starts[-1]}, saved in {seen.folder(run)}" in stopped.stdout
        assert len(starts) == 2
        assert not list(seen.place.runs.rglob(".tmp-*")) and not list(seen.place.runs.rglob(".weights-*"))

    return check


def alike(run: str, other: str) -> Check:
    """Two runs of the row have the same losses, and end with the same weights."""

    def check(seen: Seen) -> None:
        assert seen.place.losses(run) == seen.place.losses(other)
        for name in ("model.safetensors", "adapter_model.safetensors"):
            ours, theirs = (seen.folder(which) / name for which in (run, other))
            assert ours.exists() == theirs.exists()
            assert not ours.exists() or ours.read_bytes() == theirs.read_bytes()

    return check


def measured_as_trained(run: str) -> Check:
    """The loss that `evaluate --json` prints is the best that the training of a run of the world has found."""

    def check(seen: Seen) -> None:
        losses = [event["loss"] for event in seen.world.place.events(run) if event["event"] == "eval"]
        assert json.loads(seen.done[-1].stdout)["loss"] == pytest.approx(min(losses), abs=1e-3)

    return check


def keeps_budget(run: str) -> Check:
    """The peak is within the budget, and not below half of what was planned."""

    def check(seen: Seen) -> None:
        end = seen.place.events(run)[-1]
        assert 0.5 * end["planned_peak_bytes"] < end["measured_peak_bytes"] <= end["budget_bytes"]

    return check


def holds(run: str, *names: str, without: str = "model.int8.safetensors") -> Check:
    """A folder holds these files and lacks one."""

    def check(seen: Seen) -> None:
        assert {path.name for path in seen.folder(run).iterdir()} >= set(names)
        assert not (seen.folder(run) / without).exists()

    return check


def trains_adapters_alone(run: str) -> Check:
    """An adapter in PEFT's format over `whole`, and an optimizer that knows no other weights."""

    def check(seen: Seen) -> None:
        about = json.loads((seen.folder(run) / "adapter_config.json").read_text("utf8"))
        assert about["base_model_name_or_path"] == str(seen.world.path("whole").resolve())
        assert about["r"] == 4 and about["target_modules"] == ["q", "k", "v", "o", "wi", "wo"]
        with safe_open(seen.folder(run) / "checkpoints/latest/state/optimizer.safetensors", "pt") as state:
            names = list(state.keys())
        assert names and all(".adapter." in name for name in names)

    return check


def stores(run: str, storage: str) -> Check:
    """Frozen weights are stored so."""

    def check(seen: Seen) -> None:
        plan = next(event for event in seen.place.events(run) if event["event"] == "plan")
        assert plan["choice"]["storage"] == storage

    return check


def same_answers(count: int) -> Check:
    """The last commands have printed the same answer, which is not empty."""

    def check(seen: Seen) -> None:
        answers = {done.stdout for done in seen.done[-count:]}
        assert len(answers) == 1 and answers.pop().strip()

    return check


def answers_right(file: str, share: float) -> Check:
    """Of the answers in a file, at least this share are the references of `pairs.jsonl`, in its order."""

    def check(seen: Seen) -> None:
        rows = [json.loads(line) for line in (seen.place.folder / file).read_text("utf8").splitlines()]
        assert [row["prompt"] for row in rows] == prompts_of(seen.world.pairs)
        references = [json.loads(line)["response"] for line in seen.world.pairs.read_text("utf8").splitlines()]
        right = [row["response"] == reference for row, reference in zip(rows, references, strict=True)]
        assert sum(right) >= share * len(rows)

    return check


def labels_right(file: str, share: float) -> Check:
    """Of the labels in a file, at least this share are those of its rows, each with the highest probability."""

    def check(seen: Seen) -> None:
        rows = [json.loads(line) for line in (seen.place.folder / file).read_text("utf8").splitlines()]
        assert sum(row["label"] == row["reference"] for row in rows) >= share * len(rows) > 0
        assert all(row["probabilities"][row["label"]] == max(row["probabilities"].values()) for row in rows)

    return check


def answers_from_list(seen: Seen) -> None:
    """What was printed last is a response of `pairs.jsonl`."""
    rows = [json.loads(line) for line in seen.world.pairs.read_text("utf8").splitlines()]
    assert seen.done[-1].stdout.strip() in {row["response"] for row in rows}


def scores(name: str, least: float) -> Check:
    """A score that `evaluate --json` prints is at least so high."""

    def check(seen: Seen) -> None:
        assert json.loads(seen.done[-1].stdout)[name] >= least

    return check


def leaves_nothing(seen: Seen) -> None:
    """Nothing has been written."""
    assert not seen.place.runs.exists() and not seen.place.logs.exists()


def leaves(*names: str) -> Check:
    """These files are in the row's folder."""

    def check(seen: Seen) -> None:
        assert {path.name for path in seen.place.folder.iterdir()} >= set(names)

    return check


def stores_template(run: str) -> Check:
    """A model remembers how its prompts are written, and its samples show it."""

    def check(seen: Seen) -> None:
        stored = json.loads((seen.folder(run) / "prompt_template.json").read_text("utf8"))
        assert stored == {"prompt_template": "问：{prompt}\n答：", "source_prefix": "chat: ", "turns": True}
        samples = [event for event in seen.place.events(run) if event["event"] == "sample"]
        assert samples and all(sample["prompt"].startswith("chat: 问：word") for sample in samples)

    return check


def knows_tokens(run: str, *tokens: str) -> Check:
    """A tokenizer has these tokens at its end, and the embedding of its model has rows for them that have learnt."""

    def check(seen: Seen) -> None:
        import torch

        from data.tokenizers.tokenizer import Tokenizer
        from model import hf_format

        tokenizer, model, base = (
            Tokenizer.load(seen.folder(run)),
            hf_format.load(seen.folder(run)),
            seen.world.path("whole"),
        )
        ids = [tokenizer.token_to_id(token) or 0 for token in tokens]
        before = hf_format.load(base).embedding
        first = Tokenizer.load(base).size
        assert min(ids) == first and max(ids) < model.config.vocab_size
        assert torch.equal(model.embedding[:first], before[:first]) and not torch.equal(*model.embedding[ids])

    return check


def loads_in_transformers(folder: str, kind: str = "AutoModelForSeq2SeqLM") -> Check:
    """The library that defines the format reads a folder, and its logits are ours."""

    def check(seen: Seen) -> None:
        import torch
        import transformers

        from model import hf_format

        path = seen.world.fill(folder.replace("{here}", str(seen.place.folder)))
        theirs = getattr(transformers, kind).from_pretrained(path, dtype=torch.float32).eval()
        tokenizer, ours = transformers.AutoTokenizer.from_pretrained(path), hf_format.load(path)
        rows = tokenizer(["the river runs", "春天的河水从石桥下流过"], return_tensors="pt", padding=True)
        assert rows.input_ids[0].tolist().count(tokenizer.eos_token_id) == 1
        decoded = torch.tensor([[0, 7, 8, 9], [0, 30, 31, 1]])
        with torch.no_grad():
            expected = theirs(**rows, decoder_input_ids=decoded).logits
            logits = ours.logits(rows.input_ids, decoded, rows.attention_mask)
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)

    return check


@dataclass(frozen=True)
class Row:
    """What a user does and must see.

    Args:
        commands: run one after the other in the row's folder. All but those that are stopped, and the last, must
            succeed.
    """

    name: str
    commands: tuple[Command, ...]
    checks: tuple[Check, ...]
    is_slow: bool = False


RESUME = "train --is_keep_training=True"
QUESTION = "--input='the river 3' --max_new_tokens=12"
BASE = "--finetune_from={whole} --max_seq_len=64 --mixed_precision=no --effective_batch_size=8"
NEW_WORDS = (
    f"--is_finetune=True --train_file={{new_words.jsonl}} {BASE} --extra_tokens={{new_words.txt}} --save_steps=2"
    " --learning_rate=0.01 --optimizer=adamw"
)
TABLE = (
    # --- the six runs of the world, and what is made of them ---
    Row(
        "a model that learnt pairs by heart answers a file of them",
        (
            "generate --model={pairs} --input={pairs.jsonl} --output={here}/answers.jsonl --max_new_tokens=12",
            "evaluate --model={pairs} --validation_file={pairs.jsonl} --eval_generate_rows=120 --json=True",
        ),
        (answers_right("answers.jsonl", 0.9), scores("exact_match", 90.0)),
    ),
    Row(
        "a head tells languages apart",
        (
            "generate --model={labels} --input={labels.jsonl} --output={here}/labelled.jsonl",
            "evaluate --model={labels} --validation_file={labels.jsonl} --json=True",
        ),
        (scores("accuracy", 0.95), labels_right("labelled.jsonl", 0.95)),
    ),
    Row(
        "what training has measured is measured again",
        ("evaluate --model={prefix} --json=True",),
        (measured_as_trained("prefix"),),
    ),
    Row(
        "a merged adapter answers as it does beside its base",
        (
            "merge --adapter={lora} --output={here}/merged",
            f"generate --model={{lora}} {QUESTION}",
            f"generate --model={{whole}} --adapter={{lora}} {QUESTION}",
            f"generate --model={{here}}/merged {QUESTION}",
        ),
        (same_answers(3),),
    ),
    Row(
        "int8 answers, and is measured against its original",
        (
            "quantize --model={pairs} --output={here}/runs/int8 --validation_file={pairs.jsonl}",
            "evaluate --model={here}/runs/int8 --validation_file={pairs.jsonl} --eval_generate_rows=60 --json=True",
        ),
        (holds("int8", "model.int8.safetensors", without="model.safetensors"), scores("exact_match", 80.0)),
    ),
    Row(
        "another dtype answers alike",
        (
            "convert --model={pairs} --output={here}/runs/bf16 --dtype=bf16",
            f"generate --model={{pairs}} {QUESTION}",
            f"generate --model={{here}}/runs/bf16 {QUESTION}",
        ),
        (same_answers(2), holds("bf16", *MODEL_FILES)),
    ),
    Row(
        "vectors of texts",
        ("embed --model={whole} --input={text.txt} --output={here}/vectors.npz",),
        (ends_with(0), leaves("vectors.npz")),
    ),
    Row(
        "answers come from a list",
        (f"generate --model={{whole}} --answers={{pairs.jsonl}} {QUESTION}",),
        (answers_from_list,),
    ),
    Row("transformers reads a T5", ("check --model={whole}",), (loads_in_transformers("{whole}"),), is_slow=True),
    Row(
        "transformers reads what was merged",
        ("merge --adapter={lora} --output={here}/merged",),
        (loads_in_transformers("{here}/merged"),),
        is_slow=True,
    ),
    # --- going on ---
    Row(
        "Ctrl-C, and on, and on once more, which is said to be done",
        (Stopped(8, signal.SIGINT, "train [whole] --run_name=cut"), RESUME, was_cut("cut"), RESUME),
        (ends_with(0, f"{STEPS}, all done earlier"), bit_for_bit("cut")),
    ),
    Row(
        "killed before the first checkpoint, and on",
        (Stopped(2, signal.SIGKILL, "train [whole] --run_name=cut"), RESUME),
        (bit_for_bit("cut"),),
        is_slow=True,
    ),
    Row(
        "killed with weights in a file, and on",
        (
            Stopped(13, signal.SIGKILL, "train [whole] --run_name=cut --weights_in=file"),
            f"{RESUME} --weights_in=file",
        ),
        (was_cut("cut"), bit_for_bit("cut")),
        is_slow=True,
    ),
    Row(
        "preferences: killed, and on with the reference of the beginning",
        (Stopped(7, signal.SIGKILL, "dpo [preferences] --run_name=cut"), "dpo --is_keep_training=True"),
        (was_cut("cut"), bit_for_bit("cut", "preferences")),
        is_slow=True,  # test_dpo_reference.py has the reference of a run that goes on, the other rows the going on.
    ),
    Row(
        "an adapter: asked to stop, and on",
        (Stopped(7, signal.SIGTERM, "train [lora] --run_name=cut"), RESUME),
        (
            was_cut("cut"),
            bit_for_bit("cut", "lora"),
            learns("cut"),
            trains_adapters_alone("cut"),
            holds("cut", *ADAPTER_FILES, without="model.safetensors"),
        ),
    ),
    Row(
        "a head: killed, and on",
        (Stopped(31, signal.SIGKILL, "train [labels] --save_steps=10 --run_name=cut"), RESUME),
        (was_cut("cut"), bit_for_bit("cut", "labels")),
        is_slow=True,
    ),
    # --- what changes no numbers ---
    Row(
        "micro-batches, recomputed blocks, files reopened, weights in RAM and the loss in ultra",
        (
            "train [whole] --run_name=way --memory_mode=ultra --memory_budget=600M --batch_size_per_gpu=3"
            " --gradient_checkpointing=True --ultra_low_mem=True",
        ),
        (same_losses("way"), keeps_budget("way")),
    ),
    Row(
        "two processes by accelerate",
        (Launched(ACCELERATE, "train [whole] --run_name=two"),),
        (ends_with(0), same_losses("two")),
        is_slow=True,  # Each process imports torch anew; test_processes.py has two without a launcher.
    ),
    Row(
        "two processes by torchrun",
        (Launched(TORCHRUN, "train [whole] --run_name=two"),),
        (ends_with(0), same_losses("two")),
        is_slow=True,
    ),
    Row(
        "two processes share preferences in micro-batches",
        (Launched(None, "dpo [preferences] --run_name=two --batch_size_per_gpu=2 --gradient_checkpointing=True"),),
        (near("two", "preferences"),),
        is_slow=True,
    ),
    Row(
        "begun by two processes, ended by one",
        (
            Launched(None, "train [whole] --run_name=cut --keep_latest_n_ckp=9"),
            cut_back("cut", 10),
            RESUME,
        ),
        (same_losses("cut"),),
        is_slow=True,
    ),
    # --- other ways to a model ---
    Row(
        "an adapter over int4 in a file: asked to stop, and on",
        (
            Stopped(7, signal.SIGTERM, "train [lora] --lora_base=int4 --weights_in=file --run_name=lora"),
            f"{RESUME} --weights_in=file",
            "merge --adapter={here}/runs/lora --output={here}/merged",
            f"generate --model={{here}}/merged {QUESTION}",
        ),
        (was_cut("lora"), learns("lora"), same_answers(1)),
        is_slow=True,
    ),
    Row(
        "tokenizer, shards, training, and conversations with a template from the newest pretraining",
        (
            "tokenizer --train_file={text.txt} --tokenizer_dir={here}/tokenizer --vocab_size=400",
            "prepare --train_file={text.txt} --tokenizer_dir={here}/tokenizer --shards_dir={here}/shards",
            f"train --train_file={{here}}/shards {' '.join(SHAPE)} --max_steps=3 --max_seq_len=64 --run_name=shards",
            "train --is_finetune=True --train_file={talks.jsonl} --max_seq_len=64 --mixed_precision=no"
            " --effective_batch_size=8 --max_steps=6 --prompt_template='问：{prompt}\\n答：' --source_prefix='chat: '"
            " --expand_turns=True --sample_rows=2 --run_name=talk",
        ),
        (
            ends_with(
                0, "starting from {here}/runs/shards", "only 2 rows held out for evaluation", "--validation_file"
            ),
            holds("shards", *MODEL_FILES),
            learns("talk", 0.0),
            stores_template("talk"),
        ),
    ),
    Row(
        "new tokens train beside an adapter over int8 and are merged",
        (
            f"train {NEW_WORDS} --max_steps=4 --lora_rank=2 --lora_base=int8 --run_name=lora",
            "merge --adapter={here}/runs/lora --output={here}/runs/merged",
        ),
        (
            learns("lora"),
            stores("lora", "int8"),
            holds("lora", *ADAPTER_FILES, without="model.safetensors"),
            holds("merged", *MODEL_FILES),
            knows_tokens("merged", "<a_1>", "<a_2>"),
        ),
    ),
    Row(
        "new tokens go on exactly, and transformers reads them",
        (
            f"train {NEW_WORDS} --max_steps=4 --lr_schedule=constant --warmup_steps=0 --run_name=one",
            f"train {NEW_WORDS} --max_steps=2 --lr_schedule=constant --warmup_steps=0 --run_name=cut",
            f"{RESUME} --run_name=cut --max_steps=4",
        ),
        (alike("cut", "one"), loads_in_transformers("{here}/runs/cut")),
        is_slow=True,
    ),
    # --- refused ---
    Row(
        "what does not fit is refused before anything is written",
        ("train [whole] --run_name=big --memory_budget=100M",),
        (ends_with(3, "does not fit", "--memory_budget = 100.0 MiB"), leaves_nothing),
    ),
)


@pytest.mark.parametrize(
    "row", [pytest.param(row, id=row.name, marks=[pytest.mark.slow] * row.is_slow) for row in TABLE]
)
def test_what_a_user_does(world: World, tmp_path: Path, row: Row) -> None:
    seen = Seen(world, world.beside(tmp_path))
    for number, command in enumerate(row.commands):
        seen.run(command)
        if isinstance(command, str) and number < len(row.commands) - 1:
            assert seen.done[-1].returncode == 0, seen.done[-1].stdout + seen.done[-1].stderr
    for check in row.checks:
        check(seen)
