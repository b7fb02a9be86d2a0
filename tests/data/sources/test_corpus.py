from __future__ import annotations

import json
from pathlib import Path

import pytest

from data.sources import corpus
from data.sources.corpus import SampleCorpus, build_sample_corpus
from settings.errors import UserError
from storage import NotMade, only_if_made


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


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(corpus, "_library", lambda: tmp_path / "library")
    (tmp_path / "library").mkdir()
    return tmp_path / "library"


MODULE = '''"""The module.

It has prose."""

# a comment
# of three
# lines

class Box:
    """A box of things."""

    def put(self, thing):
        """Put a thing into the box.

        More about it."""
        self.things.append(thing)  # kept

def undocumented(): return 1
'''


def test_text_and_pairs_of_a_module(library: Path) -> None:
    (library / "box.py").write_text(MODULE)
    (library / "broken.py").write_text("def (")
    (library / "latin.py").write_bytes(b"# \xff")
    (library / "escape.py").write_text("'''Old \\d escape.'''")  # warns when it is parsed
    modules = list(corpus._modules())
    assert len(modules) == 2
    source, tree = modules[0]
    prose = corpus._prose(source, tree)
    assert prose[0].startswith("The module.") and "a comment\nof three\nlines" in prose
    assert list(corpus._pairs(source, tree)) == [
        ("def put(self, thing):\n    self.things.append(thing)  # kept", "Put a thing into the box.")
    ]


def test_short_texts_share_documents() -> None:
    documents = list(corpus._documents(["word " * 100] * 10))
    assert len(documents) == 3 and "".join(documents).count("word") == 1000


def test_a_python_without_sources_is_a_user_error(library: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="carries no sources"):
        build_sample_corpus(tmp_path / "cache")
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]
