"""Vectors of texts are the encoder's hidden states, in every file format, and the same after an interruption."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from commands import embed as embedding
from commands import text_reader
from commands.embed import embed
from common.units import MIB
from data.tokenizers.tokenizer import Tokenizer
from memory.processes import ProcessTree
from model import hf_format
from model.reference import T5Reference
from settings.declared import Config
from settings.errors import DoesNotFit, UserError
from settings.loading import load
from tests.measuring import in_child

pytestmark = pytest.mark.usefixtures("one_thread")
TEXTS = [f"text number {at} " + "x" * (at % 7) for at in range(11)]


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"id": f"t{at}", "text": text}) + "\n" for at, text in enumerate(TEXTS)))
    return path


def settings(folder: Path, **flags: Any) -> Config:
    defaults = {"model": str(folder), "mixed_precision": "no"}
    return load("embed", {name: str(value) for name, value in {**defaults, **flags}.items()})


def hidden(folder: Path, text: str) -> np.ndarray[Any, Any]:
    """The encoder's output by the plain model, one text at a time, without end of text."""
    model, tokenizer = hf_format.load(folder), Tokenizer.load(folder)
    plain = T5Reference(model.config)
    plain.load_state_dict(model.state_dict())
    ids = [*tokenizer.encode_batch([text])[0].tolist(), tokenizer.eos_id]
    with torch.no_grad():
        return plain.encode(torch.tensor([ids]), torch.ones(1, len(ids)))[0, :-1].numpy()


@pytest.mark.parametrize("ending", ["npz", "parquet", "h5"])
def test_files_hold_the_encoders_states(folder: Path, texts: Path, tmp_path: Path, ending: str) -> None:
    if ending == "h5":
        pytest.importorskip("h5py")
    mean, token = tmp_path / f"mean.{ending}", tmp_path / f"token.{ending}"
    embed(settings(folder, input=texts, output=mean))
    embed(settings(folder, input=texts, output=token, vectors="token"))
    expected = hidden(folder, TEXTS[3])
    if ending == "parquet":
        vector, vectors = pq.read_table(mean)["vector"][3].as_py(), pq.read_table(token)["vectors"][3].as_py()
        assert pq.read_table(mean)["id"].to_pylist() == [f"t{at}" for at in range(11)]
    elif ending == "npz":
        vector, vectors = np.load(mean)["vectors"][3], np.load(token)["t3"]
        assert np.load(mean)["ids"].tolist() == [f"t{at}" for at in range(11)]
    else:
        import h5py

        vector, vectors = h5py.File(mean)["vectors"][3], h5py.File(token)["t3"][:]
    np.testing.assert_allclose(vectors, expected, atol=1e-5)
    np.testing.assert_allclose(vector, expected.mean(0), atol=1e-5)
    assert {path.name for path in tmp_path.iterdir()} >= {mean.name, token.name} and not list(
        tmp_path.glob("*.unfinished")
    )


def test_an_interrupted_file_is_continued_with_the_same_vectors(
    folder: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedding, "PART_ROWS", 4)
    whole, cut = tmp_path / "whole.npz", tmp_path / "cut.npz"
    embed(settings(folder, input=texts, output=whole))
    finish, calls = text_reader.Embedder.embed, []

    def twice(self: Any, some: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return finish(self, some)

    monkeypatch.setattr(text_reader.Embedder, "embed", twice)
    with pytest.raises(KeyboardInterrupt, match="same command"):
        embed(settings(folder, input=texts, output=cut))
    assert not cut.exists()
    with pytest.raises(UserError, match="--output"):
        embed(settings(folder, input=texts, output=cut, vectors="token"))
    parts = tmp_path / "cut.npz.unfinished"
    first = bytearray((parts / "00000000.arrow").read_bytes())
    first[len(first) // 2] ^= 1
    (parts / "00000000.arrow").write_bytes(first)
    (parts / ".tmp-00000002.arrow").write_bytes(b"cut off")
    embed(settings(folder, input=texts, output=cut))
    assert len(calls) == 6, "a part that is damaged is made anew, and so are those behind it"
    assert np.load(cut)["vectors"].tobytes() == np.load(whole)["vectors"].tobytes()


def test_fasta_and_a_single_text_are_read(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.fasta").write_text(">P1 one\nMKV\nLL\n>P2\nAC\n")
    embed(settings(folder, input=tmp_path / "a.fasta", output=tmp_path / "v.npz", vectors="token"))
    assert np.load(tmp_path / "v.npz").files == ["P1", "P2"]
    capsys.readouterr()
    embed(settings(folder, input="hello"))
    shown = json.loads(capsys.readouterr().out)
    np.testing.assert_allclose(shown["vector"], hidden(folder, "hello").mean(0), atol=1e-5)


def test_ids_that_are_numbers_are_kept_and_missing_ones_are_the_rows_number(folder: Path, tmp_path: Path) -> None:
    rows = [{"id": 7, "text": "a"}, {"id": 0, "text": "b"}, {"id": None, "text": "c"}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    embed(settings(folder, input=tmp_path / "rows.jsonl", output=tmp_path / "v.npz"))
    assert np.load(tmp_path / "v.npz")["ids"].tolist() == ["7", "0", "2"]


def test_texts_are_in_the_columns_of_the_models_run_unless_a_flag_names_another(folder: Path, tmp_path: Path) -> None:
    own = Path(shutil.copytree(folder, tmp_path / "own"))
    (own / "settings.json").write_text(json.dumps({"prompt_column": "question", "text_column": "text"}))
    (tmp_path / "rows.jsonl").write_text(json.dumps({"question": "a", "other": "b"}))
    for flags, text in (({}, "a"), ({"text_column": "other"}, "b")):
        embed(settings(own, input=tmp_path / "rows.jsonl", output=tmp_path / f"{text}.npz", **flags))
        vector = np.load(tmp_path / f"{text}.npz")["vectors"][0]
        np.testing.assert_allclose(vector, hidden(folder, text).mean(0), atol=1e-5)
    (own / "settings.json").write_text(json.dumps({"prepare_text": "evil"}))
    with pytest.raises(UserError, match=r"settings.json: prepare_text = evil"):
        embed(settings(own, input="a"))


@pytest.mark.parametrize("ending", ["npz", "h5"])
def test_every_id_has_a_name_of_its_own(folder: Path, tmp_path: Path, ending: str) -> None:
    """Also those that repeat one, that are longer than a name can be, or that a name cannot have."""
    if ending == "h5":
        pytest.importorskip("h5py")
    long = "x" * 70_000
    ids = ["a", "a", "a#2", long + "1", long + "2", "b/c.d"]
    (tmp_path / "rows.jsonl").write_text(
        "\n".join(json.dumps({"id": name, "text": f"of {at}"}) for at, name in enumerate(ids))
    )
    output = tmp_path / f"v.{ending}"
    embed(settings(folder, input=tmp_path / "rows.jsonl", output=output, vectors="token"))
    if ending == "npz":
        vectors = dict(np.load(output))
    else:
        import h5py

        with h5py.File(output) as file:
            vectors = {name: file[name][:] for name in file}
    shortened = [f"{'x' * 223}~{hashlib.sha256(name.encode()).hexdigest()[:32]}" for name in ids[3:5]]
    names = ["a", "a#3", "a#2", *shortened, "b/c.d" if ending == "npz" else "b_c_d"]
    assert sorted(vectors) == sorted(names)
    for at, name in enumerate(names):
        np.testing.assert_allclose(vectors[name], hidden(folder, f"of {at}"), atol=1e-5)


@pytest.mark.parametrize(("name", "told"), [("\\ud800", "half of a surrogate pair"), ("a\\u0000b", "a NUL character")])
def test_an_id_that_no_file_can_hold_is_a_bad_row(folder: Path, tmp_path: Path, name: str, told: str) -> None:
    rows, output = tmp_path / "rows.jsonl", tmp_path / "v.npz"
    rows.write_text(f'{{"id": "x", "text": "a"}}\n{{"id": "{name}", "text": "b"}}\n')
    with pytest.raises(UserError, match=f"line 2: id holds {told}"):
        embed(settings(folder, input=rows, output=output))
    embed(settings(folder, input=rows, output=output, skip_bad_rows=True))
    assert np.load(output)["ids"].tolist() == ["x"]


def test_texts_and_ids_take_memory_by_their_size(folder: Path, tmp_path: Path) -> None:
    """Some texts of 100 KB, and an id of 100,000 letters, of which an array would give each of 320 rows the room."""
    rows = [{"id": at, "text": f"{at} " * (30_000 if at < 20 else 1)} for at in range(320)]
    rows[300]["id"] = "i" * 100_000
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    code = """
import contextlib
from commands.embed import embed
from config import load

model, rows, output = sys.argv[1:]
how = {"model": model, "mixed_precision": "no", "max_seq_len": "32"}
with contextlib.redirect_stdout(sys.stderr):
    embed(load("embed", {**how, "input": "warm"}))
    taken = measure(lambda: embed(load("embed", {**how, "input": rows, "output": output})))
print(taken)
"""
    (taken,) = in_child(code, folder, tmp_path / "rows.jsonl", tmp_path / "v.npz")
    assert taken < 60 * 2**20, "the array alone would take 120 MiB"
    assert np.load(tmp_path / "v.npz")["ids"].nbytes < 2**20


def test_letters_of_proteins_have_a_vector_each(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "a.fasta").write_text(">P1\nMKVUL\n")
    embed(
        settings(folder, input=tmp_path / "a.fasta", output=tmp_path / "v.npz", vectors="token", prepare_text="prott5")
    )
    vectors = np.load(tmp_path / "v.npz")["P1"]
    np.testing.assert_allclose(vectors, hidden(folder, "M K V X L")[::2], atol=1e-5)


@pytest.mark.parametrize(
    ("flags", "told"),
    [({}, "--input"), ({"input": "x", "output": "v.txt"}, ".npz"), ({"input": "-", "output": "v.npz"}, "--input")],
)
def test_what_cannot_be_done_is_refused(folder: Path, flags: dict[str, str], told: str) -> None:
    with pytest.raises(UserError, match=told):
        embed(settings(folder, **flags))


def test_hdf5_needs_its_package(folder: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(UserError, match="pip install h5py"):
        embed(settings(folder, input=texts, output=tmp_path / "v.h5"))


def test_a_text_that_no_budget_holds_is_refused(folder: Path) -> None:
    budget = ProcessTree().usage().anon_bytes + 40 * MIB
    with pytest.raises(DoesNotFit, match="--max_seq_len"):
        embed(settings(folder, input="word " * 20_000, memory_budget=budget))


def test_vectors_of_another_model_are_not_continued(
    folder: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Path(shutil.copytree(folder, tmp_path / "other"))
    flags = {"input": texts, "output": tmp_path / "v.npz"}

    def interrupted(*arguments: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("zipfile.ZipFile", interrupted)
        with pytest.raises(KeyboardInterrupt, match="continues after 11 rows"):
            embed(settings(folder, **flags))
    with pytest.raises(UserError, match="another model"):
        embed(settings(other, **flags))
    embed(settings(folder, **flags))
    assert len(np.load(tmp_path / "v.npz")["ids"]) == 11
