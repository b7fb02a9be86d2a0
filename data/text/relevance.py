"""How a query and a document are worded for a reranker, and the examples that it learns.

A T5 is asked whether the document answers the query, and says "true" or "false"; an encoder with a head scores both
texts in one.

Source: monoT5, Nogueira et al. 2020 (arXiv 2003.06713); for encoders RankT5, Zhuang et al. 2022 (arXiv 2210.10634).
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from data.text.conversations import Examples, TextRow
from data.text.templates import Turn

RELEVANT = "true"
NOT_RELEVANT = "false"
ENDING = " Relevant:"  # With the blank before it, which belongs to a token of some tokenizers.


def scored_text(query: str, document: str) -> str:
    """The text that an encoder with a head scores."""
    return f"Query: {query} Document: {document}"


def asked_text(query: str, document: str) -> str:
    """The prompt that a T5 answers by "true" or "false"."""
    return scored_text(query, document) + ENDING


class JudgedPairs(Examples):
    """A row is a query and JSON of its documents, [[document, "true" or "false"], ...]; each document is an example."""

    ending = ENDING

    def parts(self, row: TextRow) -> Iterator[tuple[list[Turn], TextRow]]:
        query, documents = row
        for document, answer in json.loads(documents):
            yield [], (asked_text(query, document), answer)

    def texts(self, row: TextRow) -> list[str]:
        return [text for _, example in self.parts(row) for text in example]


class JudgedTexts(Examples):
    """A row is JSON of texts and JSON of their labels, one each; each text is an example."""

    def parts(self, row: TextRow) -> Iterator[tuple[list[Turn], TextRow]]:
        texts, labels = map(json.loads, row)
        for text, label in zip(texts, labels, strict=True):
            yield [], (text, json.dumps([label], ensure_ascii=False))

    def texts(self, row: TextRow) -> list[str]:
        texts: list[str] = json.loads(row[0])
        return texts
