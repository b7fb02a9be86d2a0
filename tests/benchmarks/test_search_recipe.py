"""The recipe `search`: texts of a machine become pairs and rows with the teacher's vectors, which its presets take."""

from __future__ import annotations

import gzip
import json
import struct
import zipfile
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml
from safetensors.numpy import save
from tokenizers import Tokenizer, models, pre_tokenizers

from benchmarks.parts.search_data import (
    TEACHER_TOKENIZER,
    TEACHER_WEIGHTS,
    Pair,
    Teacher,
    catalog_pairs,
    graded_sentences,
    manual_pairs,
    package_pairs,
    python_pairs,
    wordnet_pairs,
    write,
    write_graded,
)
from benchmarks.search import GradedPairs, tf_idf
from settings.declared import ROOT
from settings.loading import load
from trainer_low_mem import LowMemTrainer

DATA = "data/cache/recipes"  # Where the presets read.
WIDTH = 256
SUBJECTS = ("compiler", "library", "server", "editor", "driver", "browser", "archive", "network", "picture", "song")
VERBS = ("reads", "writes", "shows", "sends", "checks", "copies")


def english_texts() -> list[str]:
    return [f"The {first} {verb} every {second} of it." for first in SUBJECTS for verb in VERBS for second in SUBJECTS]


@pytest.fixture
def teacher(tmp_path: Path) -> Teacher:
    """A teacher of few words, from a package that lies where pip would have downloaded it."""
    words = sorted({word for text in english_texts() for word in text.replace(".", "").split()})
    vocabulary = {f"▁{word}": number for number, word in enumerate(["unknown", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="▁unknown"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    table = np.random.default_rng(0).normal(size=(len(vocabulary), WIDTH)).astype(np.float16)
    (tmp_path / "cache").mkdir()
    with zipfile.ZipFile(tmp_path / "cache" / "wordllama-0-any.whl", "w") as archive:
        archive.writestr(TEACHER_WEIGHTS, save({"embedding.weight": table}))
        archive.writestr(TEACHER_TOKENIZER, tokenizer.to_str())
    return Teacher(tmp_path / "cache")


def test_a_synopsis_belongs_to_the_description_and_to_its_translation(tmp_path: Path) -> None:
    english = tmp_path / "x_Translation-en"
    english.write_text(
        "Package: ed\nDescription-md5: 12ab\nDescription-en: classic text editor\n"
        " This is the editor that came first. It edits text line by line.\n .\n It is small and it is fast.\n\n"
    )
    chinese = tmp_path / "x_Translation-zh_CN"
    chinese.write_text(
        "Package: ed\nDescription-md5: 12ab\nDescription-zh_CN: 经典文本编辑器\n 这是第一个编辑器。\n .\n 它又小又快。\n\n"
    )
    pairs = list(package_pairs([english, chinese], ["zh"]))
    assert Pair("classic text editor", "This is the editor that came first.") in pairs
    assert Pair("This is the editor that came first.", "It edits text line by line.") in pairs
    assert Pair("classic text editor", "经典文本编辑器", is_translation=True) in pairs
    assert Pair("It is small and it is fast.", "它又小又快。", is_translation=True) in pairs


def test_a_manual_page_gives_what_it_is_about_without_its_markup(tmp_path: Path) -> None:
    page = (
        ".TH LS 1\n.SH NAME\nls \\- list directory contents\n.SH SYNOPSIS\n.B ls\n[\\fIFILE\\fR]\n"
        ".SH DESCRIPTION\nList information about the\n.B given\nfiles by name. Entries are sorted by their name.\n"
        ".nf\n  $ ls -l /tmp and so on\n.fi\n"
    )
    (tmp_path / "man1").mkdir()
    (tmp_path / "man1" / "ls.1.gz").write_bytes(gzip.compress(page.encode()))
    assert list(manual_pairs(tmp_path)) == [
        Pair("list directory contents", "List information about the given files by name."),
        Pair("List information about the given files by name.", "Entries are sorted by their name."),
    ]


def test_a_function_belongs_to_the_first_sentence_of_its_docstring(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text(
        'class OpenFile:\n    def read_all_lines(self):\n        """Read every line of the file. Blanks are kept as '
        'they are.\n\n        Args:\n            none: there is no argument to give.\n        """\n'
    )
    (tmp_path / "broken.py").write_text("def (:")
    assert list(python_pairs([tmp_path])) == [
        Pair("read all lines", "Read every line of the file."),
        Pair("Read every line of the file.", "Blanks are kept as they are."),
    ]


def test_a_message_catalog_gives_messages_with_their_translations(tmp_path: Path) -> None:
    messages = [("", "head"), ("_Open the file %s", "打开文件 %s"), ("Quit", "退出(_Q)")]
    texts = [text.encode() for pair in zip(*messages, strict=True) for text in pair]
    table_size = 8 * len(texts)
    starts = np.cumsum([28 + table_size, *(len(text) + 1 for text in texts)]).tolist()
    table = b"".join(struct.pack("<2I", len(text), start) for text, start in zip(texts, starts, strict=False))
    head = struct.pack("<7I", 0x950412DE, 0, len(messages), 28, 28 + table_size // 2, 0, 0)
    folder = tmp_path / "zh_CN" / "LC_MESSAGES"
    folder.mkdir(parents=True)
    (folder / "one.mo").write_bytes(head + table + b"\0".join(texts) + b"\0")
    assert list(catalog_pairs([tmp_path], ["zh"])) == [
        Pair("Open the file", "打开文件", is_translation=True),
        Pair("Quit", "退出", is_translation=True),
    ]


def test_a_dictionary_gives_words_with_definitions_and_examples(tmp_path: Path) -> None:
    folder = tmp_path / "wordnet-base" / "usr/share/wordnet"
    folder.mkdir(parents=True)
    (folder / "data.verb").write_text(
        "  1 This software and database is being provided\n"
        '00001740 29 v 02 breathe 0 take_a_breath 0 000 | draw air into the lungs; "I can breathe better now"\n'
    )
    assert list(wordnet_pairs(tmp_path)) == [
        Pair("breathe", "draw air into the lungs"),
        Pair("breathe", "take a breath"),
        Pair("draw air into the lungs", "I can breathe better now"),
    ]


def test_a_translation_has_the_vector_of_the_original(teacher: Teacher, tmp_path: Path) -> None:
    texts = english_texts()
    pairs = [Pair(texts[0], texts[1]), Pair(texts[2], "图书馆", is_translation=True), Pair(texts[0], texts[1])]
    counts = write(tmp_path, [("one", pairs), ("missing", [])], teacher, num_bags=5)
    assert (counts["one"], counts["missing"]) == (2, 0)
    parts = [pq.read_table(tmp_path / f"search_texts_{part}.parquet").to_pylist() for part in ("train", "valid")]
    vectors = {row["text"]: row["vector"] for part in parts for row in part}
    assert vectors["图书馆"] == vectors[texts[2]]
    np.testing.assert_allclose(vectors[texts[1]], teacher.vectors([texts[1]])[0], atol=1e-3)
    assert vectors["compiler"], "words are texts as well"


def test_sentences_of_the_benchmark_have_the_vectors_of_their_originals(teacher: Teacher, tmp_path: Path) -> None:
    texts = english_texts()
    (tmp_path / "stsb-en-train.csv").write_text(f"{texts[0]},{texts[1]},5\n")
    (tmp_path / "stsb-zh-train.csv").write_text(f"狗,{texts[1]},5\n", encoding="utf8")
    (tmp_path / "out").mkdir()
    write(tmp_path / "out", [], teacher, num_bags=0, graded=graded_sentences(tmp_path, ["zh"]))
    parts = [pq.read_table(tmp_path / f"out/search_texts_{part}.parquet").to_pylist() for part in ("train", "valid")]
    vectors = {row["text"]: row["vector"] for part in parts for row in part}
    assert vectors["狗"] == vectors[texts[0]] != vectors[texts[1]]


def test_vectors_that_know_which_sentences_are_alike_have_a_correlation_of_100(tmp_path: Path) -> None:
    lines = ["a red car,a red car,5", "a red car,a red house,3", '"a red car","one, two",0']
    (tmp_path / "stsb-en-dev.csv").write_text("\n".join(lines) + "\n")
    assert write_graded(tmp_path, tmp_path) == ["search_sts_en_valid.csv"]
    pairs = GradedPairs.read(tmp_path / "search_sts_en_valid.csv")
    assert pairs.scores.tolist() == [1.0, 0.6, 0.0]
    assert pairs.spearman(tf_idf(["a dog", "a cat", "red", "car house"])) == pytest.approx(100)


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_both_presets_train_on_the_rows_of_the_script(teacher: Teacher, tmp_path: Path) -> None:
    texts = english_texts()
    write(tmp_path, [("one", [Pair(*texts[row : row + 2]) for row in range(len(texts) - 1)])], teacher, num_bags=50)
    graded = "".join(f"{texts[row]},{texts[row + 3]},{row % 6}\n" for row in range(60))
    for part in ("train", "dev"):
        (tmp_path / f"stsb-en-{part}.csv").write_text(graded)
    write_graded(tmp_path, tmp_path)
    folders = {name: str(tmp_path / name) for name in ("output_dir", "log_dir", "cache_dir")}
    small = {
        "effective_batch_size": 4,
        "eval_rows": 4,
        "max_steps": 1,
        "warmup_steps": 0,
        "sample_rows": 0,
        "num_threads": 1,
        "memory_budget": "4G",
    }
    for name in ("search", "search_sts"):
        text = (ROOT / "presets" / f"recipe_{name}.yaml").read_text(encoding="utf8")
        settings = yaml.safe_load(text.replace(DATA, str(tmp_path)).replace("model_save", folders["output_dir"]))
        settings.pop("epochs")
        preset = tmp_path / "preset.yaml"
        preset.write_text(yaml.safe_dump({**settings, **small}), encoding="utf8")
        LowMemTrainer(load("train", {"config": str(preset), "run_name": name, **folders})).train()
        events = (tmp_path / "log_dir" / name / "metrics.jsonl").read_text(encoding="utf8").splitlines()
        assert json.loads(events[-1])["event"] == "end"
