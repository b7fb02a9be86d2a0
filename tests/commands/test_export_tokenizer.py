"""`tokenizer.json` made of other tokenizers, for runtimes that read nothing else: its ids are those of the original, or
the export names the kinds of texts with others.

The test in transformers.js needs `FRUGALT5_TRANSFORMERS_JS`, a folder `node_modules` with `@huggingface/transformers`.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks.checks.tokenizer_ids import texts, transformers_folder
from commands.exporting.tokenizer_json import (
    SENTENCES,
    described,
    differing_kinds,
    save_as_json,
    save_tokenizer,
    texts_by_kind,
    unknown_kinds,
)
from commands.exporting.vocabulary import read_vocabulary
from data.tokenizers.tokenizer import Tokenizer
from data.tokenizers.training import train_tokenizer
from tests.data.tokenizers.models import folder_of, sentencepiece_model

pytestmark = pytest.mark.filterwarnings("ignore")
JS = os.environ.get("FRUGALT5_TRANSFORMERS_JS", "")
SAME_OF_ODD_TEXTS = 0.97  # SentencePiece leaves accents in the order in which they stand, Unicode's forms do not.
MODELS: dict[str, dict[str, Any]] = {
    "unigram": {},
    "unigram, bytes": {"byte_fallback": True},
    "unigram, own symbols": {"user_defined_symbols": ["<n>", "▁<extra_id_1>", "▁<extra_id_0>"]},
    "unigram, blanks kept": {"remove_extra_whitespaces": False, "normalization_rule_name": "identity"},
    "bpe, bytes": {"model_type": "bpe", "byte_fallback": True, "user_defined_symbols": ["\n", "<n>", "a b"]},
}
TRAINED = {"our bpe": 1500, "our unigram": 2000, "our byte": 384}
LIBRARIES = ("ByT5", "Roberta")


def spiece(folder: Path, config: dict[str, Any] | None = None, **options: Any) -> Tokenizer:
    sentences = texts(1000, 1, long_letters=100)
    proto = sentencepiece_model([*SENTENCES * 20, *sentences], 6000, character_coverage=0.99, **options)
    return Tokenizer.load(folder_of(folder, proto, config or {}))


def tokenizer_of(kind: str, folder: Path) -> Tokenizer:
    if kind in MODELS:
        return spiece(folder, **MODELS[kind])
    if kind in TRAINED:
        return train_tokenizer(SENTENCES * 20, kind.removeprefix("our "), TRAINED[kind], 2**22)
    transformers_folder(folder, kind)
    return Tokenizer.load(folder)


@pytest.mark.parametrize("kind", [*MODELS, *TRAINED])
def test_the_ids_stay_the_same(kind: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(kind, tmp_path / "model")
    save_as_json(tokenizer, tmp_path / "out")
    written = Tokenizer.load(tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").is_file() and not (tmp_path / "out" / "spiece.model").exists()
    assert differing_kinds(tokenizer, written) == {}
    assert (written.size, written.pad_id, written.eos_id) == (tokenizer.size, tokenizer.pad_id, tokenizer.eos_id)
    assert written.sentinel_ids == tokenizer.sentinel_ids
    odd = list(texts(400, 2, long_letters=200))
    pairs = zip(tokenizer.encode_batch(odd), written.encode_batch(odd), strict=True)
    same = sum(ids.tolist() == others.tolist() for ids, others in pairs)
    assert same >= (SAME_OF_ODD_TEXTS if kind in MODELS else 1) * len(odd)
    for ids in tokenizer.encode_prompts(SENTENCES):
        known = [number for number in ids.tolist() if number != tokenizer.unk_id]
        assert written.decode_answer(known) == tokenizer.decode_answer(known)


def test_tokens_beyond_the_pieces_keep_their_ids(tmp_path: Path) -> None:
    """Gaps between their ids are no token of any text."""
    proto = sentencepiece_model(SENTENCES * 20, 600)
    size = 700
    folder = folder_of(tmp_path / "model", proto, {"extra_ids": 5}, added_tokens={"<n>": size, "Zürich": size + 3})
    tokenizer = Tokenizer.load(folder)
    written = save_as_json(tokenizer, tmp_path / "out")
    sample = ["In Zürich <n> and <extra_id_0>, Zürich.", "<n>", " <extra_id_4>a"]
    assert [row.tolist() for row in written.encode_prompts(sample)] == [
        row.tolist() for row in tokenizer.encode_prompts(sample)
    ]
    assert written.size == tokenizer.size == size + 4


def test_kinds_of_texts_with_other_ids_are_named(tmp_path: Path) -> None:
    tokenizer = spiece(tmp_path / "model", treat_whitespace_as_suffix=True)
    vocabulary = read_vocabulary(tokenizer, tmp_path / "model", tokenizer.size)
    line = save_tokenizer(tokenizer, vocabulary, "onnx", tmp_path / "out")
    assert line.startswith("tokenizer.json gives other ids to: plain text (100%), odd spacing (100%)")


def test_what_llama_cpp_reads_as_unknown_is_named(tmp_path: Path) -> None:
    tokenizer = tokenizer_of("our unigram", tmp_path)
    shares = unknown_kinds(tokenizer, read_vocabulary(tokenizer, tmp_path, tokenizer.size))
    assert shares["emoji and rare letters"] == 1 and "plain text" not in shares
    assert "emoji and rare letters (100%)" in described(shares)
    tokenizer = tokenizer_of("our bpe", tmp_path)
    assert unknown_kinds(tokenizer, read_vocabulary(tokenizer, tmp_path, tokenizer.size)) == {}


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*MODELS, *TRAINED, *LIBRARIES])
def test_transformers_gives_the_same_ids(kind: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = tokenizer_of(kind, tmp_path / "model")
    save_as_json(tokenizer, tmp_path / "out")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    for sample in texts_by_kind().values():
        expected = [[*ids.tolist(), tokenizer.eos_id] for ids in tokenizer.encode_prompts(sample)]
        assert theirs(list(sample)).input_ids == expected


SCRIPT = """
import fs from "fs"
import { AutoTokenizer, env } from "%s/@huggingface/transformers/dist/transformers.node.mjs"

env.allowRemoteModels = false
env.localModelPath = process.argv[2]
const tokenizer = await AutoTokenizer.from_pretrained("out")
const texts = JSON.parse(fs.readFileSync(process.argv[3]))
console.log(JSON.stringify(texts.map(text => Array.from(tokenizer.encode(text)))))
"""


@pytest.mark.slow
@pytest.mark.skipif(not JS, reason="FRUGALT5_TRANSFORMERS_JS names no folder")
@pytest.mark.parametrize("kind", [*MODELS, *TRAINED, *LIBRARIES])
def test_transformers_js_gives_the_same_ids(kind: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(kind, tmp_path / "model")
    save_as_json(tokenizer, tmp_path / "out")
    sample = [text for kinds in texts_by_kind().values() for text in kinds]
    (tmp_path / "texts.json").write_text(json.dumps(sample), encoding="utf8")
    (tmp_path / "run.mjs").write_text(SCRIPT % JS, encoding="utf8")
    command = ["node", str(tmp_path / "run.mjs"), f"{tmp_path}/", str(tmp_path / "texts.json")]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    expected = [[*ids.tolist(), tokenizer.eos_id] for ids in tokenizer.encode_prompts(sample)]
    assert json.loads(output) == expected
