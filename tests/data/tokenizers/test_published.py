from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, trainers

from data.tokenizers.tokenizer import Tokenizer

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
