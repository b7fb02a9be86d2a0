"""The hub: data by address and by name, and models that a run starts from or uploads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from data.sources.files import find
from settings.errors import UserError
from support.child_process import call
from tests.fake_hub import FakeHub, running
from training.report.card import CARD_FILE
from training.setup.hub import create_repository, download, push


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with running(tmp_path / "hub", monkeypatch) as hub:
        yield hub


CASES = (
    ("hf://datasets/o/notes/data/test-00000-of-00001.jsonl", "--train_file", ["test"]),
    ("hf://o/notes/data/tr*.jsonl", "--train_file", ["train", "train_long"]),
    ("hf://o/notes@main", "--validation_file", ["test"]),
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


def test_a_model_is_uploaded_with_its_card_and_nothing_else(hub: FakeHub, tmp_path: Path) -> None:
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


@pytest.mark.parametrize("has_plain_dense", [True, False])
def test_all_parts_of_a_folder_of_sentence_transformers_are_fetched(
    hub: FakeHub, tmp_path: Path, has_plain_dense: bool
) -> None:
    fetched = {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "modules.json",
        "config_sentence_transformers.json",
        "sentence_bert_config.json",
        "1_Pooling/config.json",
        "2_Dense/config.json",
        "2_Dense/model.safetensors" if has_plain_dense else "2_Dense/pytorch_model.bin",
    }
    others = {"pytorch_model.bin", "rust_model.ot", "README.md", "2_Dense/rust_model.ot"}
    if has_plain_dense:
        others.add("2_Dense/pytorch_model.bin")
    for name in fetched | others:
        path = hub.repository("o/gtr") / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("{}")
    call(download, "o/gtr", tmp_path / "gtr")
    names = {path.relative_to(tmp_path / "gtr") for path in (tmp_path / "gtr").rglob("*") if path.is_file()}
    assert {name.as_posix() for name in names if name.parts[0] != ".cache"} == fetched
