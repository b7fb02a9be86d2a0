"""The hub: data by address and by name, and models that a run starts from or uploads."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.child_process import ChildDied, call
from data.sources.files import find
from data.sources.places import RemoteFile
from settings.errors import UserError
from tests.fake_hub import FakeHub, running
from training.report.card import CARD_FILE
from training.setup import hub as module
from training.setup.hub import check_push, create_repository, push


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with running(tmp_path / "hub", monkeypatch) as hub:
        yield hub


CASES = (
    ("hf://datasets/o/notes/data/test-00000-of-00001.jsonl", "--train_file", ["test"]),
    ("hf://o/notes/data/tr*.jsonl", "--train_file", ["train", "train_long"]),
    ("hf://o/notes", "--train_file", ["train", "train_long"]),
    ("hf://o/notes@main", "--validation_file", ["test"]),
    ("news=hf://o/notes:test", "--validation_file", ["test"]),
    ("hf://o/notes:train_long", "--train_file", ["train_long"]),
)


def read() -> tuple[list[list[bytes]], list[str], int]:
    """In a child, which reads the hub's address anew: what the files hold, what is refused, and what marks a
    content.
    """
    contents = [[source.path.open().read() for source in find(spec, name)] for spec, name, _ in CASES]
    refused = []
    for spec in ("hf://o/other", "hf://o/notes:nothing"):
        try:
            find(spec)
        except UserError as error:
            refused += error.problems
    return contents, refused, find(CASES[0][0])[0].path.stat().st_mtime_ns


def test_data_by_address_and_by_name(hub: FakeHub) -> None:
    folder = hub.repository("o/notes", "datasets") / "data"
    folder.mkdir()
    for split in ("train", "test", "train_long"):
        (folder / f"{split}-00000-of-00001.jsonl").write_text(f'{{"text": "{split}"}}\n')
    (folder.parent / "README.md").write_text("a card")
    contents, refused, mark = call(read)
    for (spec, _, splits), content in zip(CASES, contents, strict=True):
        assert content == [f'{{"text": "{split}"}}\n'.encode() for split in splits], spec
    assert len(refused) == 2
    (folder / "test-00000-of-00001.jsonl").write_text('{"text": "TEST"}\n')
    assert call(read)[2] != mark, "what has changed is prepared anew"


def refused_addresses() -> list[str]:
    """In a child: what is said of a data set, of a file of it, and of a file that was there before."""
    problems = []
    for spec in ("hf://o/notes", "hf://datasets/o/notes/x.jsonl"):
        try:
            find(spec, "--train_file")
        except UserError as error:
            problems += error.problems
    try:
        RemoteFile("hf://datasets/o/notes/x.jsonl", "datasets/o/notes/x.jsonl").stat()
    except UserError as error:
        problems += error.problems
    return problems


def test_a_mirror_that_answers_with_a_web_page_is_named(hub: FakeHub) -> None:
    hub.page = b"<html>please log in</html>"
    problems = call(refused_addresses)
    assert len(problems) == 3 and all("hf://" in problem and "cannot be read" in problem for problem in problems)


def test_a_model_is_uploaded_with_its_card_and_nothing_else(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "model"
    (model / "checkpoints" / "step_1").mkdir(parents=True)
    uploaded = {"config.json", "model.safetensors", CARD_FILE}
    own = {"run.json", "settings.json", "owner.json"}
    for name in (*uploaded, *own, "checkpoints/step_1/x"):
        (model / name).write_text("---\ntags:\n- t5\n---\n" if name == CARD_FILE else "{}")
    create_repository("mine")
    push("mine", model)
    names = {path.name for path in hub.repository("me/mine").rglob("*")}
    assert names >= uploaded and not names & {*own, "x"}
    with pytest.raises(UserError, match=r"--push_to_hub = other/mine, .*403"):
        create_repository("other/mine")

    def crashes(*_: object) -> None:
        raise ChildDied("crashed", "exit code -11")

    monkeypatch.setattr(module, "call", crashes)
    with pytest.raises(UserError, match="hf upload mine"):
        push("mine", model)


def test_who_may_not_upload_is_told_before_the_run(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="write OWNER/NAME"):
        check_push("True")
    monkeypatch.setenv("HF_TOKEN", "hf_unknown")
    with pytest.raises(UserError, match=r"--push_to_hub = mine, .*token"):
        check_push("mine")
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(UserError, match="run: hf auth login"):
        module._answer("mine", "whoami", (), {})
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UserError, match="pip install huggingface_hub"):
        module._answer("mine", "whoami", (), {})
