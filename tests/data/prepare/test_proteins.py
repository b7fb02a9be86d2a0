"""Protein sequences: a token for each letter, however texts are prepared, and what is told where they are not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from data.prepare.encode import TextEncoder
from data.prepare.preparing import prepare
from data.prepare.preview import lost_of_shards
from data.tokenizers.training import train_tokenizer
from settings.loading import load


@pytest.mark.parametrize("how", ["prott5", "prostt5", "ankh"])
def test_prepared_proteins_have_a_token_for_each_letter(how: str) -> None:
    pieces = ["A B C D E F G H I K L M N P Q R S T V W X Y Z <AA2fold>"] * 2
    tokenizer = train_tokenizer(pieces, "words", 200, 2**20)
    encoder = TextEncoder(tokenizer, how)
    ids, places = encoder.with_places("MKUAC")
    assert encoder.encode(["MKUAC"])[0].tolist() == ids.tolist()
    letters = "".join(str(tokenizer.id_to_token(int(number))) for number in ids[places])
    assert letters == ("MK<unk>AC" if how == "ankh" else "MKXAC")


def test_proteins_without_blanks_are_told(tmp_path: Path) -> None:
    train_tokenizer(["M K V L A C D W Y G S"], "words", 200, 2**20).save(tmp_path / "tokenizer")
    rows = [{"text": text} for text in ["MKVLAC", "ACDW", "WWYLKKKKM", "GGAS"] * 30]
    path = tmp_path / "proteins.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf8")
    places = {"train_file": path, "tokenizer_dir": tmp_path / "tokenizer", "cache_dir": tmp_path / "cache"}
    flags = {name: str(value) for name, value in {**places, "objective": "denoise"}.items()}
    raw, blanks = (load("train", {**flags, "prepare_text": how}) for how in ("none", "prott5"))
    ((_, told),) = [row for row in lost_of_shards(raw.data, prepare(raw)) if row[0] == "unknown"]
    assert "--prepare_text" in told
    assert prepare(blanks).counts["train_unknown_tokens"] == 0, "pretraining prepares texts too"
