"""Requests for documents by their relevance, and their answers, in the words of Cohere, Jina and vLLM.

Source: Cohere's API reference, v1 and v2 rerank; Jina's reranker API; vLLM's score and rerank API.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from serving.answers import Refused
from serving.asking import MOST_INPUTS, OPEN_BYTES, PROMPT_TOKEN_BYTES, ROW_BYTES, UNCUT, Fields, Texts
from settings.declared import GenerateConfig
from tasks.label_outputs import EncodedText

PATH = "/v1/rerank"
FIELDS = ("query", "documents", "top_n", "return_documents", "max_tokens_per_doc")
LETTER_BYTES = 8  # of a letter of a document, in Python and in the JSON of the answer
DOCUMENTS_ALLOWED = f"a list of up to {MOST_INPUTS} texts, or of objects with a text"


@dataclass(frozen=True)
class RerankRequest:
    """One request for documents by their relevance.

    Args:
        documents: as the request has them. texts: encoded, each with the query.
        top_n: how many are wanted. returns_documents: whether they are sent back.
        unknown: fields that were ignored.
    """

    documents: tuple[Any, ...]
    texts: tuple[EncodedText, ...]
    top_n: int
    returns_documents: bool
    unknown: tuple[str, ...]

    @property
    def tokens(self) -> int:
        """Of all documents, each with the query."""
        return sum(len(text.ids) for text in self.texts)

    @property
    def held_bytes(self) -> int:
        """What the request holds until it is answered: ids, results, and documents that are sent back."""
        letters = len(str(self.documents)) if self.returns_documents else 0
        rows = ROW_BYTES * len(self.texts)
        return OPEN_BYTES + PROMPT_TOKEN_BYTES * self.tokens + rows + LETTER_BYTES * letters


def read_rerank(body: dict[str, Any], texts: Texts, defaults: GenerateConfig) -> RerankRequest:
    """A body of /v1/rerank.

    Raises:
        Refused: it is wrong, or the query is too long.
    """
    fields = Fields(body)
    query = fields.take("query", "", "a text that is not empty", lambda x: isinstance(x, str) and x.strip())
    documents = fields.take("documents", [], DOCUMENTS_ALLOWED, _are_documents)
    for name, value in (("query", query), ("documents", documents)):
        if not value:
            raise Refused(400, f"{name}, is missing; send it", name)
    top_n = fields.whole("top_n", 0, 0, 2**31)  # 0: all, as for vLLM.
    returns_documents = fields.take("return_documents", True, "true or false", lambda x: type(x) is bool)
    longest_document = fields.whole("max_tokens_per_doc", UNCUT, 1, 2**62)
    unknown = fields.end(FIELDS)
    encoded = texts.scored(query, [_text_of(document) for document in documents], longest_document)
    count = min(top_n or len(documents), len(documents))
    return RerankRequest(tuple(documents), tuple(encoded), count, returns_documents, unknown)


def _are_documents(value: Any) -> bool:
    return (
        isinstance(value, list) and len(value) <= MOST_INPUTS and all(isinstance(_text_of(one), str) for one in value)
    )


def _text_of(document: Any) -> Any:
    return document.get("text") if isinstance(document, dict) else document


def answer_of(request: RerankRequest, scores: Sequence[float], model: str) -> dict[str, Any]:
    """The answer to a request: the documents with the highest scores, of equal ones the first."""
    order = sorted(range(len(scores)), key=lambda index: -scores[index])
    results = []
    for index in order[: request.top_n]:
        result: dict[str, Any] = {"index": index, "relevance_score": scores[index]}
        if request.returns_documents:
            document = request.documents[index]
            result["document"] = {"text": document} if isinstance(document, str) else document
        results.append(result)
    usage = {"prompt_tokens": request.tokens, "total_tokens": request.tokens}
    return {"id": f"rerank-{secrets.token_hex(12)}", "model": model, "results": results, "usage": usage}
