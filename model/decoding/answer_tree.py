"""A list of answers as a prefix tree over token ids (a trie): what may come next after each beginning.

Nodes are numbered level by level, so that the children of a node lie side by side, in the order of their tokens: two
arrays hold the tree. Every answer ends with the end token, whose node is a leaf.

Source: constrained beam search over entities, De Cao et al. 2021 (arXiv 2010.00904).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from support.language import say
from support.storage import open_plain

Ids = NDArray[np.int64]
ROOT = 0  # The node before the first token.
DEAD = -1  # The node of a beam that is out of the search.


@dataclass(frozen=True)
class Choices:
    """The tokens that may come next, in k of the rows of a step, W at most in each.

    Args:
        rows: (k,) those that may go on. first: (k,) node of the first child. counts: (k,) of children.
        tokens: (k, W) ids, -1 behind the last child. head: (U,) rows of the head to compute; None: all.
        columns: (k, W) of the tokens' logits among those computed.
    """

    rows: Ids
    first: Ids
    counts: Ids
    tokens: Ids
    head: Ids | None
    columns: Ids


class AnswerTree:
    """All answers of a list.

    Args:
        tokens: (nodes,) the token of each node. starts: (nodes + 1,) where its children begin, and those of the next
            node.
        longest: tokens of the longest answer with its end token.
    Memory: 6 bytes a node, 8 of vocabularies over 65,536 tokens.
    """

    def __init__(self, tokens: NDArray[np.integer], starts: NDArray[np.int32], longest: int) -> None:
        self.tokens = tokens
        self.starts = starts
        self.longest = longest
        self.num_bytes = tokens.nbytes + starts.nbytes
        degrees = np.diff(starts)
        self.num_answers = int((degrees == 0).sum())
        self._first_choices = int(degrees[ROOT])
        self._later_choices = int(degrees[1:].max())

    @classmethod
    def build(cls, answers: Iterable[NDArray[np.integer]], eos_id: int) -> AnswerTree:
        """The tree of answers (token ids without the end token), in any order, repeated ones once.

        Raises:
            ValueError: there is none, or one has the end token inside.
        Memory: some 35 bytes an answer and 20 a token, besides the tree.
        """
        end = np.array([eos_id], ">u4").tobytes()  # The bytes of big-endian numbers sort as they do.
        listed = sorted({ids.astype(">u4").tobytes() + end for ids in answers})
        if not listed:
            raise ValueError(say("no answer"))
        lengths = np.array([len(packed) // 4 for packed in listed], np.int32)
        flat = np.frombuffer(b"".join(listed), ">u4").astype(np.uint32)
        del listed
        offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        if int((flat == eos_id).sum()) != len(lengths):
            raise ValueError(say("an answer has the end token {eos_id} inside", eos_id=eos_id))
        tokens = [np.zeros(1, np.uint32)]
        degrees = list[NDArray[np.int32]]()
        rows = np.arange(len(lengths))
        parents = np.zeros(len(rows), np.int64)  # Each row's node in the level above.
        is_new = np.arange(len(rows)) == 0  # True where a row is the first one of its node.
        above = 1  # There are so many nodes in the level above.
        while len(rows):
            level = flat[offsets[rows] + len(degrees)]
            is_new[1:] |= level[1:] != level[:-1]
            degrees.append(np.bincount(parents[is_new], minlength=above).astype(np.int32))
            tokens.append(level[is_new])
            parents = np.cumsum(is_new) - 1
            above = int(is_new.sum())
            going = lengths[rows] > len(degrees)
            rows = rows[going]
            parents = parents[going]
            is_new = np.ones(len(rows), bool)
            is_new[1:] = parents[1:] != parents[:-1]
        degrees.append(np.zeros(above, np.int32))
        starts = np.concatenate([[1], 1 + np.cumsum(np.concatenate(degrees), dtype=np.int64)]).astype(np.int32)
        joined = np.concatenate(tokens)
        small = np.uint16 if joined.max() < 2**16 else np.int32
        return cls(joined.astype(small), starts, int(lengths.max()))

    @classmethod
    def load(cls, path: Path) -> AnswerTree:
        """The tree that `save` wrote.

        Raises:
            what numpy and zipfile raise over a damaged file; ValueError: its arrays are no tree.
        """
        with open_plain(path) as file, np.load(file) as arrays:
            tokens = arrays["tokens"]
            starts = arrays["starts"]
            longest = int(arrays["longest"])
        is_tree = (
            tokens.ndim == starts.ndim == 1
            and len(starts) == len(tokens) + 1
            and tokens.dtype.kind in "iu"
            and starts.dtype.kind == "i"
            and 0 < longest <= len(tokens)
            and starts[0] == 1
            and starts[-1] == len(tokens)
            and np.all(np.diff(starts) >= 0)
        )
        if not is_tree:
            raise ValueError("no tree of answers")
        return cls(tokens, starts, longest)

    def save(self, path: Path) -> None:
        """Write the tree to a file."""
        with path.open("wb") as file:
            np.savez(file, tokens=self.tokens, starts=self.starts, longest=np.array(self.longest))

    def most_choices(self, beams: int) -> int:
        """The most tokens that each of a prompt's beams has to choose from, on average: only one has the first
        token's.
        """
        return max(-(-self._first_choices // beams), self._later_choices)

    def __contains__(self, ids: Sequence[int]) -> bool:
        """Whether token ids, the end token last, are an answer."""
        node = ROOT
        for token in ids:
            first, last = self.starts[node : node + 2]
            node = int(first + np.searchsorted(self.tokens[first:last], token))
            if node == last or self.tokens[node] != token:
                return False
        return bool(self.starts[node] == self.starts[node + 1])

    def degrees(self, nodes: Ids) -> Ids:
        """How many tokens may come after each node (n,)."""
        return (self.starts[nodes + 1] - self.starts[nodes]).astype(np.int64)

    def leaves(self, nodes: Ids) -> tuple[Ids, Ids]:
        """Where only one answer goes on from nodes (n,): its leaf, else `DEAD`, and the tokens up to it."""
        leaves = nodes.copy()
        counts = np.zeros(len(nodes), np.int64)
        going = np.flatnonzero(nodes != DEAD)
        while len(going):
            first = self.starts[leaves[going]]
            degrees = self.degrees(leaves[going])
            leaves[going[degrees > 1]] = DEAD
            going = going[degrees == 1]
            leaves[going] = first[degrees == 1]
            counts[going] += 1
        return leaves, counts

    def tail(self, node: int) -> list[int]:
        """The tokens that must follow, where only one answer goes on from a node; else none."""
        (leaf,), (count,) = self.leaves(np.array([node]))
        return [] if leaf == DEAD or not count else self.answer(int(leaf))[-int(count) :]

    def answer(self, leaf: int) -> list[int]:
        """Token ids of an answer, the end token last."""
        tokens = []
        while leaf != ROOT:
            tokens.append(int(self.tokens[leaf]))
            # For a number of another type numpy would convert all starts in each search.
            leaf = int(np.searchsorted(self.starts, self.starts.dtype.type(leaf), "right")) - 1
        return tokens[::-1]

    def choices(self, nodes: Ids, vocab_size: int) -> Choices:
        """What may come after nodes (n,); `DEAD` ones have no choice.

        The head is computed for the allowed tokens only where they are less than half of the vocabulary.
        """
        rows = np.flatnonzero(nodes != DEAD)
        first = self.starts[nodes[rows]].astype(np.int64)
        counts = self.degrees(nodes[rows])
        columns = np.arange(counts.max(initial=1))
        tokens = self.tokens[np.minimum(first[:, None] + columns, len(self.tokens) - 1)].astype(np.int64)
        tokens[columns >= counts[:, None]] = -1
        head, head_columns = np.unique(np.maximum(tokens, 0), return_inverse=True)
        if 2 * len(head) > vocab_size:
            return Choices(rows, first, counts, tokens, None, np.maximum(tokens, 0))
        return Choices(rows, first, counts, tokens, head, head_columns.reshape(tokens.shape))
