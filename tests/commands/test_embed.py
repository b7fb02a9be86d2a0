"""Vectors of texts are the encoder's hidden states, in every file format, and the same after an interruption."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from commands import embed as module
from commands.embed import embed
from data.tokenizers.tokenizer import Tokenizer
from memory.processes import ProcessTree
from model import hf_format
from model.reference import T5Reference
from settings.errors import DoesNotFit, UserError
from support.units import MIB
from tests.commands.small import flags_of, write_rows
from tests.measuring import in_child

pytestmark = pytest.mark.usefixtures("one_thread")
TEXTS = [f"text number {at} " + "x" * (at % 7) for at in range(11)]
Vectors = dict[str, np.ndarray[Any, Any]]


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "texts.jsonl", ({"id": f"t{at}", "text": text} for at, text in enumerate(TEXTS)))


def run(folder: Path, **flags: Any) -> None:
    embed(flags_of("embed", model=folder, mixed_precision="no", **flags))


def vectors_of(output: Path) -> Vectors:
    """What a file holds, by id."""
    if output.suffix == ".parquet":
        table = pq.read_table(output)
        return dict(zip(table[0].to_pylist(), map(np.array, table[1].to_pylist()), strict=True))
    if output.suffix == ".npz":
        arrays = dict(np.load(output))
    else:
        import h5py

        with h5py.File(output) as file:
            arrays = {name: value.asstr()[:] if name == "ids" else value[:] for name, value in file.items()}
    return dict(zip(arrays["ids"].tolist(), arrays["vectors"], strict=True)) if "vectors" in arrays else arrays


def hidden(folder: Path, text: str) -> np.ndarray[Any, Any]:
    """The encoder's output by the plain model, one text at a time, without end of text."""
    model = hf_format.load(folder)
    tokenizer = Tokenizer.load(folder)
    plain = T5Reference(model.config)
    plain.load_state_dict(model.state_dict())
    ids = [*tokenizer.encode_batch([text])[0].tolist(), tokenizer.eos_id]
    with torch.no_grad():
        return plain.encode(torch.tensor([ids]), torch.ones(1, len(ids)))[0, :-1].numpy()


@pytest.mark.parametrize("ending", ["npz", "parquet", "h5"])
def test_files_hold_the_encoders_states(folder: Path, texts: Path, tmp_path: Path, ending: str) -> None:
    if ending == "h5":
        pytest.importorskip("h5py")
    run(folder, input=texts, output=tmp_path / f"mean.{ending}")
    run(folder, input=texts, output=tmp_path / f"token.{ending}", vectors="token")
    means, states = (vectors_of(tmp_path / f"{name}.{ending}") for name in ("mean", "token"))
    assert {*means} == {*states} == {f"t{at}" for at in range(11)}
    np.testing.assert_allclose(states["t3"], hidden(folder, TEXTS[3]), atol=1e-5)
    np.testing.assert_allclose(means["t3"], hidden(folder, TEXTS[3]).mean(0), atol=1e-5)
    assert not list(tmp_path.glob("*.unfinished"))


def test_an_interrupted_file_is_continued_with_the_same_vectors(
    folder: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PART_ROWS", 4)
    whole, cut = tmp_path / "whole.npz", tmp_path / "cut.npz"
    run(folder, input=texts, output=whole)
    with monkeypatch.context() as patch:
        patch.setattr("zipfile.ZipFile", interrupt)
        with pytest.raises(KeyboardInterrupt, match="the same command continues after 11 rows"):
            run(folder, input=texts, output=cut)
    assert not cut.exists()
    for other in ({"vectors": "token"}, {"model": shutil.copytree(folder, tmp_path / "other")}):
        with pytest.raises(UserError, match="another model, input or settings"):
            embed(
                flags_of("embed", **{"model": folder, "mixed_precision": "no", "input": texts, "output": cut, **other})
            )
    run(folder, input=texts, output=cut)
    assert np.load(cut)["vectors"].tobytes() == np.load(whole)["vectors"].tobytes()


def interrupt(*arguments: Any, **options: Any) -> None:
    raise KeyboardInterrupt


def test_fasta_and_a_single_text_are_read(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of proteins each letter has a vector."""
    (tmp_path / "a.fasta").write_text(">P1 one\nMKV\nUL\n>P2\nAC\n")
    how = {"vectors": "token", "prepare_text": "prott5"}
    run(folder, input=tmp_path / "a.fasta", output=tmp_path / "v.npz", **how)
    vectors = vectors_of(tmp_path / "v.npz")
    assert list(vectors) == ["P1", "P2"]
    np.testing.assert_allclose(vectors["P1"], hidden(folder, "M K V X L")[::2], atol=1e-5)
    capsys.readouterr()
    run(folder, input="hello")
    row = json.loads(capsys.readouterr().out)
    np.testing.assert_allclose(row["vector"], hidden(folder, "hello").mean(0), atol=1e-5)


def test_texts_and_ids_take_memory_by_their_size(folder: Path, tmp_path: Path) -> None:
    """Some texts of 100 KB, and an id of 100,000 letters, of which an array would give each of 320 rows the room."""
    rows: list[dict[str, Any]] = [{"id": at, "text": f"{at} " * (30_000 if at < 20 else 1)} for at in range(320)]
    rows[300]["id"] = "i" * 100_000
    write_rows(tmp_path / "rows.jsonl", rows)
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
    (used_bytes,) = in_child(code, folder, tmp_path / "rows.jsonl", tmp_path / "v.npz")
    assert used_bytes < 60 * 2**20, "the array alone would take 120 MiB"
    assert np.load(tmp_path / "v.npz")["ids"].nbytes < 2**20


def test_a_text_that_no_budget_holds_is_refused(folder: Path) -> None:
    with pytest.raises(DoesNotFit, match="--max_seq_len"):
        run(folder, input="word " * 20_000, memory_budget=ProcessTree().usage().anon_bytes + 40 * MIB)
