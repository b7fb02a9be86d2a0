from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, trainers

from data.tokenizers.tokenizer import Tokenizer
from settings.errors import UserError

CODE = ["def add(a, b):\n    return a + b", "for i in range(10):  print(i)", "class A: pass", "你好 naïve"] * 3


def codet5_folder(folder: Path) -> Path:
    """A tokenizer as CodeT5's folder has it: no tokenizer.json, special ids 0-4, sentinels in added_tokens.json."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<pad>", "<s>", "</s>", "<unk>", "<mask>"],
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    backend.train_from_iterator(CODE, trainer)
    folder.mkdir()
    backend.model.save(str(folder))
    with (folder / "merges.txt").open("a") as merges:
        merges.write("\n")  # A blank line is no merge.
    size = backend.get_vocab_size()
    added = {f"<extra_id_{number}>": size + 99 - number for number in range(100)}
    (folder / "added_tokens.json").write_text(json.dumps(added))
    contents = {"bos": "<s>", "eos": "</s>", "unk": "<unk>", "pad": "<pad>", "mask": "<mask>"}
    names = {f"{role}_token": content for role, content in contents.items()}
    (folder / "special_tokens_map.json").write_text(json.dumps(names))
    (folder / "tokenizer_config.json").write_text(json.dumps({**names, "tokenizer_class": "RobertaTokenizer"}))
    return folder


def test_codet5(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(codet5_folder(tmp_path / "codet5"))
    assert (tokenizer.pad_id, tokenizer.eos_id, tokenizer.unk_id) == (0, 2, 3)
    assert tokenizer.num_sentinels == 100 and tokenizer.sentinel_ids[0] == tokenizer.size - 1
    for text, ids in zip(CODE, tokenizer.encode_batch(CODE), strict=True):
        assert tokenizer.decode(ids) == text
    tokenizer.save(tmp_path / "json")
    again = Tokenizer.load(tmp_path / "json")
    assert [ids.tolist() for ids in again.encode_batch(CODE)] == [ids.tolist() for ids in tokenizer.encode_batch(CODE)]
    (ids,) = tokenizer.encode_batch(["return </s> <extra_id_0>"])
    assert not set(ids.tolist()) & {2, tokenizer.sentinel_ids[0]}
    assert tokenizer.encode_batch(["<extra_id_0>"], special=True)[0].tolist() == [tokenizer.sentinel_ids[0]]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_codet5_gives_the_ids_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    folder = codet5_folder(tmp_path / "codet5")
    (folder / "merges.txt").write_text((folder / "merges.txt").read_text().rstrip("\n"))  # It reads no blank line.
    reference, ours = transformers.RobertaTokenizer.from_pretrained(folder), Tokenizer.load(folder)
    for text, ids in zip(CODE, ours.encode_prompts(CODE), strict=True):
        assert reference(text).input_ids == [*ids.tolist(), 2]
    ours.save(tmp_path / "run")
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "run")
    assert again("return a").input_ids == [*ours.encode_prompts(["return a"])[0].tolist(), 2]


@pytest.mark.parametrize(
    "file, content, problem",
    [
        ("vocab.json", "{", "download them again"),
        ("merges.txt", "a b c\n", "download them again"),
        ("added_tokens.json", "[1", "download it again"),
        ("added_tokens.json", '{"<extra_id_0>": 5000}', "extra_id_0>' has the id 5000"),
    ],
)
def test_broken_files_and_gaps_between_ids_are_user_errors(
    tmp_path: Path, file: str, content: str, problem: str
) -> None:
    folder = codet5_folder(tmp_path / "codet5")
    (folder / file).write_text(content)
    with pytest.raises(UserError, match=problem):
        Tokenizer.load(folder)


def test_a_byte_that_byt5_has_as_a_token_keeps_its_id(tmp_path: Path) -> None:
    flags = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word", "special"), False)
    about = {"tokenizer_class": "ByT5Tokenizer", "added_tokens_decoder": {"13": {"content": "\n", **flags}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(about))
    assert Tokenizer.load(tmp_path).encode_prompts(["a\n"])[0].tolist() == [100, 13]


def test_missing_special_tokens_are_named(tmp_path: Path) -> None:
    folder = codet5_folder(tmp_path / "codet5")
    names = json.loads((folder / "special_tokens_map.json").read_text())
    for file in ("special_tokens_map.json", "tokenizer_config.json"):
        (folder / file).write_text(json.dumps({**names, "eos_token": "[NONE]", "tokenizer_class": "RobertaTokenizer"}))
    with pytest.raises(UserError, match=r"has no \[NONE\] \(eos_token\)"):
        Tokenizer.load(folder)
