"""Queries with the documents to rank: from rows with lists, and from rows of one document each."""

from __future__ import annotations

from pathlib import Path

import pytest

from data.sources.files import find
from data.sources.lines import BadRows
from data.sources.rankings import Ranking, rankings_in_child, read_rankings
from settings.errors import UserError
from support.units import MIB
from tests.data.sources.rows import Row, write_rows

LISTED = {"id": 7, "query": "q", "documents": ["a", "b", "c"], "relevant": [2, 0]}


def rankings_of(path: Path, bad_rows: BadRows | None = None) -> list[Ranking]:
    return list(read_rankings(find(str(path)), bad_rows or BadRows()))


@pytest.mark.parametrize("ending", ["jsonl", "parquet", "arrow"])
def test_a_row_with_all_documents_is_a_ranking(tmp_path: Path, ending: str) -> None:
    (ranking,) = rankings_of(write_rows(tmp_path / f"a.{ending}", [LISTED]))
    assert (ranking.query, ranking.documents, ranking.is_flat) == ("q", ["a", "b", "c"], False)
    assert ranking.relevance == [1, 0, 1]
    assert ranking.records == [{"id": 7, "relevant": [2, 0]}]


def test_in_csv_lists_are_json(tmp_path: Path) -> None:
    rows = [{"query": "q", "documents": '["a", "b"]', "relevant": relevant} for relevant in ("[1]", "")]
    first, second = rankings_of(write_rows(tmp_path / "a.csv", rows))
    assert (first.documents, first.relevance, second.relevance) == (["a", "b"], [0, 1], None)


def test_rows_as_in_training_are_rankings(tmp_path: Path) -> None:
    for negatives in ({"neg": ["b", "c"]}, {"negative": "b", "negative_2": "c"}, {"neg": '["b", "c"]'}):
        (ranking,) = rankings_of(write_rows(tmp_path / "a.jsonl", [{"query": "q", "pos": "a", **negatives, "id": 7}]))
        assert (ranking.documents, ranking.relevance) == (["a", "b", "c"], [1, 0, 0])
        assert ranking.records == [{"id": 7, "relevant": [0]}]
    rows = [{"query": "q", "pos": "a"}, {"query": "r", "pos": "a", "neg": ["b"]}]
    assert [ranking.documents for ranking in rankings_of(write_rows(tmp_path / "a.jsonl", rows))] == [["a"], ["a", "b"]]


@pytest.mark.parametrize("ending", ["jsonl", "parquet", "csv"])
def test_rows_of_one_document_are_a_ranking_where_they_stand_together(tmp_path: Path, ending: str) -> None:
    rows = [{"query": query, "document": document, "label": label} for query, document, label in FLAT]
    first, second, third = rankings_of(write_rows(tmp_path / f"a.{ending}", rows))
    assert [ranking.query for ranking in (first, second, third)] == ["q", "r", "q"]
    assert (first.documents, first.relevance, first.is_flat) == (["a", "b"], [1, 0], True)
    assert [record["document"] for record in first.records] == ["a", "b"]
    assert second.relevance == [3]


FLAT = [("q", "a", 1), ("q", "b", 0), ("r", "c", 3), ("q", "d", 1)]


def test_relevance_is_known_of_all_documents_of_a_query_or_not(tmp_path: Path) -> None:
    rows = [{"query": "q", "document": "a", "label": 1}, {"query": "q", "document": "b"}]
    (ranking,) = rankings_of(write_rows(tmp_path / "a.jsonl", rows))
    assert ranking.relevance is None


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({**LISTED, "relevant": [3]}, "relevant has 3; allowed: indices of documents, 0 to 2"),
        ({**LISTED, "relevant": 1}, "relevant holds int, not a list"),
        ({**LISTED, "documents": "a"}, "documents holds no list"),
        ({"query": "q", "documents": [1]}, "document is int, not a text"),
        ({**LISTED, "query": ""}, "query is empty"),
        ({"query": "q", "document": "a", "label": -1}, "label is -1"),
        ({"query": "q", "document": ["a"], "label": 1}, "document is list, not a text"),
    ],
)
def test_a_bad_row_is_named_or_left_out(tmp_path: Path, row: Row, words: str) -> None:
    path = write_rows(tmp_path / "a.jsonl", [row])
    with pytest.raises(UserError, match=words):
        rankings_of(path)
    bad_rows = BadRows(skip=True)
    assert rankings_of(path, bad_rows) == [] and bad_rows.count == 1


def test_other_columns_are_refused_with_those_that_are_needed(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="columns: prompt, response; needed: query and documents"):
        rankings_of(write_rows(tmp_path / "a.jsonl", [{"prompt": "a", "response": "b"}]))


def test_the_documents_of_one_query_are_bounded(tmp_path: Path) -> None:
    rows = [{"query": "q", "document": "d" * MIB} for _ in range(17)]
    with pytest.raises(UserError, match=r"line 16: .*larger than 16 MiB"):
        rankings_of(write_rows(tmp_path / "a.jsonl", rows))


@pytest.mark.children
def test_a_child_reads_the_same(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", [LISTED, {**LISTED, "query": None}, LISTED])
    bad_rows = BadRows(skip=True)
    assert list(rankings_in_child(find(str(path)), bad_rows, 512 * MIB)) == rankings_of(path, BadRows(skip=True))
    assert bad_rows.count == 1
