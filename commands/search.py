"""`search`: the texts of a corpus that are most alike to each query, by the cosines of all of them; or hard negatives.

The vectors of the corpus are computed once and kept (`commands.corpus`). Queries come in parts, and each part is
compared with the whole corpus, block by block, so that memory holds neither all vectors nor all cosines.

Hard negatives are texts of the corpus that are alike to a query and do not belong to it: all that some row of the input
puts beside this query are left out, and so is what is nearly as alike as these, which may well belong to it and only
have no row. Source: Moreira et al. 2024 (arXiv 2407.15831), TopK-PercPos; `mine_hard_negatives` of
sentence-transformers 6.2.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from commands import text_rows
from commands.answering import Answering, find_answering
from commands.corpus import BLOCK_BYTES, Corpus, CorpusWork, held_bytes, key_of
from commands.embed import cut_notes
from commands.new_folder import holding_output
from commands.text_reader import DOCUMENT, LENGTH_MULTIPLE, QUERY, Embedder, full_width, text_columns
from commands.text_rows import TextWork, UnfinishedFile, check_input, fingerprint_of, in_parts, join_files
from commands.vector_files import ID
from data.sources.embedding_columns import SECOND_TEXTS
from data.sources.files import find
from data.sources.lines import BadRows
from data.sources.prompts import Prompt, prompts_in_child
from data.sources.relevance import entries
from data.sources.source import Source
from engine.nearest import NONE, QUERIES, nearest
from memory.answers import AnswerBatch
from settings.declared import Config
from settings.errors import UserError
from settings.fields import counted, is_encodable, listed
from support.language import say
from support.storage import read_once_made
from support.units import MIB
from training.loaded_model import WAITING_BYTES, note

FOLDER = "vectors"  # Of `cache_dir`.
DIGITS = 6  # Cosines are written with so many digits.
PAIR_BYTES = 32  # Of a query and a text that belongs to it: their keys, and the same in another order.
FOUND_BYTES = 32  # Of a text that was found: its cosine and number, twice.
SCORE_COPIES = 3  # Cosines of a block, sorted and beside the best so far.
Rows = list[dict[str, Any]]  # What a query gives.


@holding_output
def search(config: Config) -> None:
    """Write for each query of `--input` the texts of `--corpus` that are most alike to it, or rows with hard negatives.

    Raises:
        UserError: the model, the input, the corpus or the output cannot be used.
        DoesNotFit: the budget does not hold the longest text, or what is known of each text of the corpus.
    """
    for name, value in (("input", config.answer.input), ("corpus", config.search.corpus)):
        if value is None:
            text = "--{name} = none, is needed: --input are the queries, --corpus the texts that are searched"
            raise UserError(text, name=name)
    corpus_file = str(config.search.corpus)
    corpus_files = find(corpus_file, "--corpus")
    if not corpus_files or not check_input(corpus_file):
        raise UserError("--corpus = {path}, is no file or folder of texts", path=corpus_file)
    if config.answer.output is not None:
        text_rows.check_is_not_read(Path(config.answer.output), corpus_files)
    mines = config.search.num_negatives > 0
    if mines and (config.answer.output is None or not check_input(str(config.answer.input))):
        raise UserError(
            "--num_negatives = {count}, needs a file of queries with their positives as --input, and an --output",
            count=config.search.num_negatives,
        )
    answering = find_answering(config, "search")
    full_width(answering.model.shape, config.embed)
    for text in cut_notes(answering):
        note(text)
    work = (Negatives if mines else Found)(answering, _corpus(config))
    text_rows.run(work)


def _corpus(config: Config) -> Corpus:
    """The texts that are searched; their vectors are computed where that was not done before."""
    config = config.with_changes(input=config.search.corpus, output=None, prompt_name=DOCUMENT, overwrite=False)
    work = CorpusWork(config)
    path = Path(config.data.cache_dir, FOLDER, f"{fingerprint_of(work)}.arrow")
    is_new = not path.exists()

    def make(partial_path: Path) -> None:
        text_rows.run(CorpusWork(config.with_changes(output=str(partial_path))))

    corpus = read_once_made(path, make, Corpus, resumable=True)
    text = "{corpus}: vectors of {rows} in {file}" if is_new else "{corpus}: vectors of {rows} from {file}"
    note(say(text, corpus=config.search.corpus, rows=counted(len(corpus), "row"), file=path))
    return corpus


class SearchWork(TextWork[Rows]):
    """What is found for queries.

    Args:
        corpus: that is searched.
    """

    batch_flag = "eval_batch_size_per_gpu"
    part_suffix = ".jsonl"
    version = 1

    def __init__(self, answering: Answering, corpus: Corpus) -> None:
        super().__init__(answering, text_columns(answering, QUERY))
        self.corpus = corpus
        self.num_rows = 0  # That were written.

    def load(self, reads_files: bool = False) -> dict[str, int]:
        longest_text = AnswerBatch(rows=1, source_tokens=self.config.data.max_seq_len, new_tokens=1)
        self.trained = self.answering.load(longest_text, reads_files)
        settings = replace(self.config.embed, prompt_name=QUERY)
        rows = self.config.train.eval_batch_size_per_gpu
        self.embedder = Embedder(self.trained, self.config.data, rows, settings)
        scores_bytes = SCORE_COPIES * QUERIES * BLOCK_BYTES // self.corpus.width
        found_bytes = FOUND_BYTES * QUERIES * self.num_found
        self.embedder.beside_bytes = held_bytes(len(self.corpus)) + scores_bytes + found_bytes
        return self.embedder.predicted_memory(LENGTH_MULTIPLE)

    @property
    def num_found(self) -> int:
        """How many texts are looked for."""
        return min(self.config.search.num_documents, self.corpus.distinct)

    def identity(self) -> list[Any]:
        data = self.config.data
        corpus = self.config.search.corpus
        return [
            *(data.text_column, data.max_seq_len, data.prepare_text, data.query_prompt, data.document_prompt),
            *(self.config.embed.truncate_dim, self.config.memory.mixed_precision),
            *(vars(self.config.search), text_rows.file_marks(str(corpus))),
        ]

    def parts(self, prompts: Iterator[Prompt], rows_done: int = 0) -> Iterator[list[Rows]]:
        queries = (prompt for prompt in prompts if prompt.text.strip())
        for part in in_parts(islice(queries, rows_done, None), QUERIES, WAITING_BYTES, Prompt.num_bytes):
            yield self.rows(part)

    def rows(self, queries: Sequence[Prompt]) -> list[Rows]:
        """What each query gives."""
        raise NotImplementedError

    def vectors(self, texts: Sequence[str], prompt_name: str) -> Tensor:
        """Vectors of texts, of length 1, on the device."""
        vectors = np.stack(self.embedder.embed(texts, prompt_name))
        return F.normalize(torch.from_numpy(vectors).to(self.device), dim=-1)

    @property
    def device(self) -> torch.device:
        """Where vectors are compared."""
        return self.trained.device.torch_device

    def show(self, part: list[Rows]) -> None:
        for rows in part:
            for row in rows:
                print(json.dumps(row, ensure_ascii=False), flush=True)

    def write(self, part: list[Rows], path: Path) -> None:
        lines = (json.dumps(row, ensure_ascii=False) + "\n" for rows in part for row in rows)
        path.write_text("".join(lines), encoding="utf8")

    def join(self, parts: Sequence[Path], rows: int, path: Path) -> None:
        join_files(parts, path)
        with path.open("rb") as file:
            while piece := file.read(MIB):
                self.num_rows += piece.count(b"\n")

    def notes(self, output: UnfinishedFile | None, bad_rows: BadRows) -> list[str]:
        notes: list[str] = []
        if output is not None:
            notes.append(say("{file}: {rows}", file=output.path, rows=counted(self.num_rows, "row")))
        if self.embedder.num_cut:
            rows = counted(self.embedder.num_cut, "row")
            notes.append(say("truncated to --max_seq_len={longest}: {rows}", longest=self.embedder.longest, rows=rows))
        if bad_rows.count:
            rows = counted(bad_rows.count, "row")
            notes.append(say("left out: {rows}, such as {example}", rows=rows, example=bad_rows.examples[0]))
        return notes


class Found(SearchWork):
    """The texts that are most alike to each query."""

    keeps = (ID,)

    def rows(self, queries: Sequence[Prompt]) -> list[Rows]:
        vectors = self.vectors([query.text for query in queries], QUERY)
        cosines, numbers = nearest(vectors, self.corpus.blocks(self.device), self.num_found)
        return [
            [self._row(query, *found)]
            for query, *found in zip(queries, cosines.tolist(), numbers.tolist(), strict=True)
        ]

    def _row(self, query: Prompt, cosines: list[float], numbers: list[int]) -> dict[str, Any]:
        own_id = query.columns.get(ID)
        documents = []
        for cosine, number in zip(cosines, numbers, strict=True):
            document_id, text = self.corpus.id_and_text(number)
            documents.append({ID: document_id, "text": text, "score": round(cosine, DIGITS)})
        return {**({} if own_id in (None, "") else {ID: own_id}), "query": query.text, "documents": documents}

    def show(self, part: list[Rows]) -> None:
        """A typed query gets lines for people: cosine, id and text."""
        if self.config.answer.input is not None and check_input(self.config.answer.input):
            super().show(part)
            return
        for rows in part:
            for document in rows[0]["documents"]:
                text = " ".join(document["text"].split())
                print(f"{document['score']:.4f}\t{document[ID]}\t{text}", flush=True)


class Asked(NamedTuple):
    """A query with the texts that belong to it."""

    query: str
    positives: list[str]


class KnownPairs:
    """Which texts belong to which query, by their keys, over all rows.

    Args:
        rows: of the input.
    Memory: `PAIR_BYTES` for each pair.
    """

    def __init__(self, rows: Iterator[Asked]) -> None:
        queries = array("q")
        documents = array("q")
        for row in rows:
            queries.extend([key_of(row.query)] * len(row.positives))
            documents.extend(map(key_of, row.positives))
        keys = np.array(queries, np.int64)
        order = np.argsort(keys, kind="stable")
        self._queries = keys[order]
        self._documents = np.array(documents, np.int64)[order]

    def __len__(self) -> int:
        return len(self._queries)

    def documents_of(self, query: str) -> NDArray[np.int64]:
        """The keys of the texts that belong to a query."""
        key = key_of(query)
        begin, end = np.searchsorted(self._queries, key), np.searchsorted(self._queries, key, side="right")
        return self._documents[begin:end]


class Negatives(SearchWork):
    """Rows to train on: a query, a text that belongs to it, and texts that do not though they are alike."""

    keeps = None
    known: KnownPairs

    def __init__(self, answering: Answering, corpus: Corpus) -> None:
        super().__init__(answering, corpus)
        self.num_without = 0

    @property
    def num_found(self) -> int:
        return min(self.config.search.num_negatives, self.corpus.distinct)

    @cached_property
    def _named(self) -> str:
        """The column of positives where the settings name it; empty: by its usual names."""
        words = [word.strip() for word in self.config.data.text_column.split(",")]
        return words[1] if len(words) > 1 else ""

    def read(self, sources: Sequence[Source], bad_rows: BadRows, max_bytes: int) -> Iterator[Prompt]:
        """The rows of files; read once before, for what belongs to each query by any of them."""
        before = prompts_in_child(sources, self.columns, BadRows(bad_rows.skip), max_bytes)
        self.known = KnownPairs(self._asked(prompt) for prompt in before if prompt.text.strip())
        self.embedder.beside_bytes += PAIR_BYTES * len(self.known)
        return super().read(sources, bad_rows, max_bytes)

    def _asked(self, prompt: Prompt) -> Asked:
        names = [self._named] if self._named else [name for name in SECOND_TEXTS if name in prompt.columns]
        if not names or names[0] not in prompt.columns:
            raise UserError(
                "{place}: has no text that belongs to the query; its columns: {columns}; name both with "
                "--text_column=QUERY,POSITIVE",
                place=prompt.origin,
                columns=listed(prompt.columns),
            )
        texts = [text for text in entries(prompt.columns[names[0]]) if isinstance(text, str) and text.strip()]
        if not all(map(is_encodable, texts)):
            raise UserError("{place}: {name} holds half of a surrogate pair", place=prompt.origin, name=names[0])
        return Asked(prompt.text, texts)

    def rows(self, queries: Sequence[Prompt]) -> list[Rows]:
        every = [self._asked(query) for query in queries]
        asked = [each for each in every if each.positives]
        found = iter(self._found(asked) if asked else [])
        rows = [self._rows(each, next(found)) if each.positives else [] for each in every]
        self.num_without += sum(not of_query for of_query in rows)
        return rows

    def _found(self, asked: Sequence[Asked]) -> list[list[int]]:
        """The numbers of the negatives of each query."""
        vectors = self.vectors([each.query for each in asked], QUERY)
        counts = [len(each.positives) for each in asked]
        positives = self.vectors([text for each in asked for text in each.positives], DOCUMENT).split(counts)
        # The least alike of several positives decides.
        own = torch.stack([(vector @ of_query.T).min() for vector, of_query in zip(vectors, positives, strict=True)])
        below = own - own.abs() * self.config.search.relative_margin
        hide = partial(_hide, below, *self._known_places(asked))
        _, numbers = nearest(vectors, self.corpus.blocks(self.device), self.num_found, hide)
        return [[number for number in row if number != NONE] for row in numbers.tolist()]

    def _known_places(self, asked: Sequence[Asked]) -> tuple[Tensor, Tensor]:
        """Query and number of each text of the corpus that belongs to a query, in the order of the numbers."""
        of_queries = [self.corpus.numbers_of(self.known.documents_of(each.query)) for each in asked]
        queries = np.repeat(np.arange(len(asked)), list(map(len, of_queries)))
        numbers = np.concatenate(of_queries)
        order = np.argsort(numbers, kind="stable")
        return torch.from_numpy(queries[order]).to(self.device), torch.from_numpy(numbers[order]).to(self.device)

    def _rows(self, asked: Asked, numbers: list[int]) -> Rows:
        negatives = [self.corpus.id_and_text(number)[1] for number in numbers]
        if not negatives:
            return []
        return [{"query": asked.query, "pos": positive, "neg": negatives} for positive in asked.positives]

    def notes(self, output: UnfinishedFile | None, bad_rows: BadRows) -> list[str]:
        notes = super().notes(output, bad_rows)
        if self.num_without:
            text = "without hard negatives: {rows}; a smaller --relative_margin or a larger --corpus may give some"
            notes.append(say(text, rows=counted(self.num_without, "row")))
        return notes


def _hide(below: Tensor, queries: Tensor, numbers: Tensor, cosines: Tensor, block: Tensor) -> None:
    """Take away what is no negative: what is too alike, and what belongs to a query.

    Args:
        below: (Q,) what cosines have to be less than.
        queries, numbers: (P,) what belongs to which, by ascending numbers.
        cosines: (Q, n) of a block, which are changed. block: (n,) numbers of its texts, ascending.
    """
    cosines.masked_fill_(cosines >= below[:, None], -torch.inf)
    places = torch.searchsorted(block, numbers).clamp(max=len(block) - 1)
    is_here = block[places] == numbers
    cosines[queries[is_here], places[is_here]] = -torch.inf
