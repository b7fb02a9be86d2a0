from __future__ import annotations

import json
from pathlib import Path

import pytest

from common.storage import NotMade, only_if_made
from data.sources import corpus
from data.sources.corpus import SampleCorpus, build_sample_corpus
from settings.errors import UserError


def test_the_sample_is_real_prose(sample: SampleCorpus) -> None:
    texts = [json.loads(line)["text"] for line in sample.text.read_text(encoding="utf8").splitlines()]
    assert len(texts) > 500 and 10**6 < sum(map(len, texts)) < 20 * 10**6
    assert len(set(texts)) == len(texts)
    assert any("dictionary" in text for text in texts)


def test_the_pairs_are_functions_and_the_first_line_of_their_docstrings(sample: SampleCorpus) -> None:
    pairs = [json.loads(line) for line in sample.pairs.read_text(encoding="utf8").splitlines()]
    assert len(pairs) > 2000
    for pair in pairs:
        assert pair["prompt"].lstrip().startswith(("def ", "async def ")), pair
        assert "\n" not in pair["response"]
    assert {"prompt", "response"} == set(pairs[0])


def test_it_is_found_again(sample: SampleCorpus, tmp_path: Path) -> None:
    assert build_sample_corpus(sample.text.parent.parent, only_if_made) == sample
    with pytest.raises(NotMade):
        build_sample_corpus(tmp_path, only_if_made)


def test_a_python_without_sources_is_a_user_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "_library", lambda: tmp_path)
    with pytest.raises(UserError, match="carries no sources"):
        build_sample_corpus(tmp_path / "cache")
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]
