"""The built-in corpus: what it holds, and where it is kept."""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path

import pytest

from common.storage import NotMade, only_if_made
from data.sources.corpus import SampleCorpus, build_sample_corpus
from settings.errors import UserError


def rows_in(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text(encoding="utf8").splitlines()]


def test_the_sample_is_prose_and_functions_with_the_first_line_of_their_docstrings(sample: SampleCorpus) -> None:
    texts = [row["text"] for row in rows_in(sample.text)]
    assert len({*texts}) == len(texts) > 500
    assert 10**6 < sum(map(len, texts)) < 20 * 10**6
    assert any("dictionary" in text for text in texts)
    pairs = rows_in(sample.pairs)
    assert len(pairs) > 2000
    assert all(row.keys() == {"prompt", "response"} and "\n" not in row["response"] for row in pairs)
    assert all(row["prompt"].lstrip().startswith(("def ", "async def ")) for row in pairs)


def test_it_is_found_again(sample: SampleCorpus, tmp_path: Path) -> None:
    assert build_sample_corpus(sample.text.parent.parent, only_if_made) == sample
    with pytest.raises(NotMade):
        build_sample_corpus(tmp_path, only_if_made)


def test_a_python_without_sources_is_a_user_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(UserError, match="carries no sources"):
        build_sample_corpus(tmp_path / "cache")
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]
