"""`rerank`: the documents of each query of a file by how relevant they are, best first.

A row with all documents of a query gives one JSON line, with `results`; where each document is a row, each gives a line
with its `score` and `rank`. Where the rows say which documents are relevant, the ranking is scored as well.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from commands import text_rows
from commands.answering import find_answering
from commands.document_scorer import answers_of, refuse_unable, scorer_of
from commands.generate import LEAST_TEXT, REFERENCE
from commands.new_folder import holding_output
from commands.text_reader import LENGTH_MULTIPLE
from commands.text_rows import TextWork, UnfinishedFile, check_input, in_parts
from data.sources.lines import BadRows
from data.sources.rankings import Ranking, rankings_in_child
from data.sources.source import Source
from settings.declared import Config
from settings.errors import UserError
from settings.fields import counted, is_encodable
from settings.tasks import MODEL_HEADS
from support.language import say
from training.evaluation.ranking import RankingScores
from training.loaded_model import WAITING_BYTES, note
from training.report.log_files import plain

PART_DOCUMENTS = 256  # A part ends with the query that brings so many documents.
MOST_QUERIES_KNOWN = 65_536  # Among so many, one whose rows stand apart is noticed.
DIGITS = 6  # Scores are written with so many digits.
QUERY = "query"
RESULTS = "results"
SCORE = "score"
RANK = "rank"
GRADES = "grades"  # Of a ranking in a part: how relevant its documents are, best ranked first.
LINES = "lines"


@dataclass(frozen=True)
class Ranked:
    """A ranking with the scores of its documents.

    Args:
        scores: in the order of the file.
    """

    ranking: Ranking
    scores: list[float]

    @cached_property
    def order(self) -> list[int]:
        """The documents by their indices, best first; of equal scores the first one of the file."""
        return sorted(range(len(self.scores)), key=lambda index: -self.scores[index])

    @property
    def grades(self) -> list[float] | None:
        """How relevant the documents are, best ranked first; None: it is not known."""
        relevance = self.ranking.relevance
        return None if relevance is None else [relevance[index] for index in self.order]

    def rows(self) -> Iterator[dict[str, Any]]:
        """What is written: a row of all documents, or one of each; columns of the same names become `..._reference`."""
        ranking = self.ranking
        if ranking.is_flat:
            for rank, index in enumerate(self.order, 1):
                columns: dict[str, Any] = {SCORE: round(self.scores[index], DIGITS), RANK: rank}
                yield {**_renamed(ranking.records[index], columns), **columns}
            return
        results = [
            {"index": index, SCORE: round(self.scores[index], DIGITS), "document": ranking.documents[index]}
            for index in self.order
        ]
        columns = {RESULTS: results}
        yield {QUERY: ranking.query, **_renamed(ranking.records[0], columns), **columns}


def _renamed(record: dict[str, Any], columns: Iterable[str]) -> dict[str, Any]:
    taken = {*columns}
    return {f"{name}_{REFERENCE}" if name in taken else name: cell for name, cell in record.items()}


@holding_output
def rerank(config: Config) -> None:
    """Rank the documents of a file for their queries, into another file or on the screen.

    Raises:
        UserError: model, input or output are not usable. DoesNotFit: the budget does not hold a document.
    """
    source = config.answer.input
    if source is None or not check_input(source):
        raise UserError(
            "--input = {source}, give a file of queries with their documents, such as JSON lines with query and "
            "documents",
            source=source or "none",
        )
    text_rows.run(RerankWork(config))


class RerankWork(TextWork[Ranked]):
    """Documents with scores."""

    batch_flag = "eval_batch_size_per_gpu"
    part_suffix = ".jsonl"
    version = 1

    def __init__(self, config: Config) -> None:
        answering = find_answering(config, "rerank")
        super().__init__(answering, [])
        model = answering.model
        refuse_unable(model)
        writes_text = MODEL_HEADS[model.shape.head].writes_text
        self.answers = answers_of(answering.config, model) if writes_text else None
        self.scores = RankingScores()
        self.num_documents = 0
        self.num_cut = 0
        self.first_cut = ""
        self.num_apart = 0
        self.first_apart = ""

    def load(self, reads_files: bool = False) -> dict[str, int]:
        if self.answers is not None:
            relevant, other = self.answers
            note(say("scores: log-probability of {relevant!r} against {other!r}", relevant=relevant, other=other))
        self.trained = self.answering.load(LEAST_TEXT, reads_files)
        rows = self.config.train.eval_batch_size_per_gpu
        self.scorer = scorer_of(self.trained, self.config.data, self.answers, rows)
        return self.scorer.predicted_memory(LENGTH_MULTIPLE)

    def read(self, sources: Sequence[Source], bad_rows: BadRows, max_bytes: int) -> Iterator[Ranking]:
        return rankings_in_child(sources, bad_rows, max_bytes)

    def identity(self) -> list[Any]:
        data = self.config.data
        settings = [data.max_seq_len, data.prompt_template, data.source_prefix, data.prepare_text]
        return [settings, self.answers, self.config.memory.mixed_precision]

    def parts(self, prompts: Iterator[Ranking], rows_done: int = 0) -> Iterator[list[Ranked]]:
        def size(ranking: Ranking) -> int:
            """Bytes of the row, or if that is more its documents, scaled to count against `WAITING_BYTES`."""
            return max(ranking.num_bytes(), len(ranking.documents) * WAITING_BYTES // PART_DOCUMENTS)

        remaining = islice(self._noticed(prompts), rows_done, None)
        for part in in_parts(remaining, PART_DOCUMENTS, WAITING_BYTES, size):
            yield self._ranked(part)

    def _noticed(self, rankings: Iterator[Ranking]) -> Iterator[Ranking]:
        """The same rankings; queries whose rows stand apart are counted."""
        known = set[int]()
        for ranking in rankings:
            mark = hash(ranking.query)
            if ranking.is_flat and mark in known:
                self.num_apart += 1
                self.first_apart = self.first_apart or ranking.origin
            elif ranking.is_flat and len(known) < MOST_QUERIES_KNOWN:
                known.add(mark)
            yield ranking

    def _ranked(self, part: list[Ranking]) -> list[Ranked]:
        longest = self.config.data.max_seq_len
        texts = []
        for ranking in part:
            for document in ranking.texts:
                text = self.scorer.encode_document(ranking.query, document, longest)
                if text.is_cut:
                    self.num_cut += 1
                    self.first_cut = self.first_cut or ranking.origin
                texts.append(text)
        scores = iter(self.scorer.scores(texts))
        return [Ranked(ranking, list(islice(scores, len(ranking.documents)))) for ranking in part]

    def show(self, part: list[Ranked]) -> None:
        for ranked in part:
            self._count(ranked.grades, len(ranked.scores))
            print("".join(map(_json_line, ranked.rows())), end="", flush=True)

    def write(self, part: list[Ranked], path: Path) -> None:
        """Before the lines of each ranking stands one with how many they are and what is known of its documents."""
        with path.open("w", encoding="utf8") as file:
            for ranked in part:
                lines = list(map(_json_line, ranked.rows()))
                head = {LINES: len(lines), "documents": len(ranked.scores), GRADES: ranked.grades}
                file.write(json.dumps(head) + "\n")
                file.writelines(lines)

    def join(self, parts: Sequence[Path], rows: int, path: Path) -> None:
        with path.open("w", encoding="utf8") as whole:
            for part in parts:
                with part.open(encoding="utf8") as file:
                    for line in file:
                        head = json.loads(line)
                        self._count(head[GRADES], head["documents"])
                        whole.writelines(islice(file, head[LINES]))

    def _count(self, grades: list[float] | None, documents: int) -> None:
        self.num_documents += documents
        if grades is not None:
            self.scores.add(grades)

    def notes(self, output: UnfinishedFile | None, bad_rows: BadRows) -> list[str]:
        notes: list[str] = []
        if output is not None:
            documents = counted(self.num_documents, "document")
            text = "{file}: {documents} ranked; queries: {count}"
            notes.append(say(text, file=output.path, documents=documents, count=f"{output.rows:,}"))
        if self.num_cut:
            text = "truncated to --max_seq_len={longest}: {documents}, first {first}"
            documents = counted(self.num_cut, "document")
            notes.append(say(text, longest=self.config.data.max_seq_len, documents=documents, first=self.first_cut))
        if self.num_apart:
            text = (
                "groups of rows whose query stands further above as well: {count}, first {first}; each was ranked by "
                "itself; sort the rows by query"
            )
            notes.append(say(text, count=f"{self.num_apart:,}", first=self.first_apart))
        if bad_rows.count:
            rows = counted(bad_rows.count, "row")
            notes.append(say("left out: {rows}, such as {example}", rows=rows, example=bad_rows.examples[0]))
        return notes + self._score_notes()

    def _score_notes(self) -> list[str]:
        means = self.scores.means()
        notes: list[str] = []
        if means:
            scores = ", ".join(f"{name} {100 * mean:.2f}" for name, mean in means.items())
            notes.append(say("in percent: {scores}; queries: {count}", scores=scores, count=f"{self.scores.queries:,}"))
        if self.scores.without_relevant:
            count = f"{self.scores.without_relevant:,}"
            notes.append(say("queries without a relevant document, not scored: {count}", count=count))
        return notes


def _json_line(row: dict[str, Any]) -> str:
    row = plain(row)
    line = json.dumps(row, ensure_ascii=False)
    return (line if is_encodable(line) else json.dumps(row)) + "\n"
