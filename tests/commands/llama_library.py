"""llama.cpp itself, by its shared library: what a GGUF gives there. `LLAMA_CPP_LIBRARY` names the file, such as
`libllama.so` of the npm package @node-llama-cpp/linux-x64 or of llama-cpp-python; without it such tests are skipped.

Its structures change from version to version, and are only handed on here: opaque ones that are larger than any of
them do, as they are returned and passed in memory.
"""

from __future__ import annotations

import ctypes
import os
from ctypes import POINTER, c_bool, c_char_p, c_float, c_int32, c_void_p
from pathlib import Path
from typing import Any

import numpy as np
import pytest


class Opaque(ctypes.Structure):
    """A structure of llama.cpp, whatever it holds."""

    _fields_ = [("bytes", ctypes.c_byte * 1024)]


class LlamaModel:
    """A GGUF, opened by llama.cpp."""

    def __init__(self, path: Path) -> None:
        library = os.environ.get("LLAMA_CPP_LIBRARY")
        if library is None:
            pytest.skip("LLAMA_CPP_LIBRARY names no library")
        self._library = _library(library)
        self._model = self._library.llama_model_load_from_file(
            str(path).encode(), self._library.llama_model_default_params()
        )
        assert self._model, "llama.cpp does not load it"
        self._vocab = self._library.llama_model_get_vocab(self._model)
        self._size = self._library.llama_vocab_n_tokens(self._vocab)
        self._width = self._library.llama_model_n_embd(self._model)

    def ids(self, text: str) -> list[int]:
        """Of a text, `</s>` at its end; names of special tokens are these tokens."""
        content = text.encode()
        ids = (c_int32 * (len(content) + 16))()
        count = self._library.llama_tokenize(self._vocab, content, len(content), ids, len(ids), True, True)
        return list(ids[:count])

    def pooled(self, ids: list[int]) -> Any:
        """(D,) of an encoder, pooled as the file says."""
        context = self._context()
        self._library.llama_set_embeddings(context, True)
        self._run(self._library.llama_encode, context, ids)
        numbers = np.array(self._library.llama_get_embeddings_seq(context, 0)[: self._width], np.float32)
        self._library.llama_free(context)
        return numbers

    def logits(self, ids: list[int], answer: list[int]) -> Any:
        """(T, V) of an answer, token by token."""
        context = self._context()
        self._run(self._library.llama_encode, context, ids)
        rows = []
        for number in answer:
            self._run(self._library.llama_decode, context, [number])
            rows.append(self._library.llama_get_logits_ith(context, -1)[: self._size])
        self._library.llama_free(context)
        return np.array(rows, np.float32)

    def answers(self, sources: list[list[int]], start: int, end: int, new_tokens: int) -> list[list[int]]:
        """Greedy answers to sources, without start and end token."""
        context = self._context()
        memory = self._library.llama_get_memory(context)
        answers: list[list[int]] = []
        for ids in sources:
            self._library.llama_memory_clear(memory, True)
            self._run(self._library.llama_encode, context, ids)
            answer = [start]
            while len(answer) <= new_tokens:
                self._run(self._library.llama_decode, context, answer[-1:])
                row = self._library.llama_get_logits_ith(context, -1)
                token = int(np.ctypeslib.as_array(row, (self._size,)).argmax())
                if token == end:
                    break
                answer.append(token)
            answers.append(answer[1:])
        self._library.llama_free(context)
        return answers

    def close(self) -> None:
        """Free the weights."""
        self._library.llama_model_free(self._model)

    def _context(self) -> Any:
        context = self._library.llama_init_from_model(self._model, self._library.llama_context_default_params())
        self._library.llama_set_n_threads(context, 1, 1)
        return context

    def _run(self, function: Any, context: Any, ids: list[int]) -> None:
        tokens = (c_int32 * len(ids))(*ids)
        assert function(context, self._library.llama_batch_get_one(tokens, len(ids))) == 0


def _library(path: str) -> Any:
    library = ctypes.CDLL(path)
    ids = POINTER(c_int32)
    for name, result, arguments in (
        ("ggml_backend_load_all_from_path", None, [c_char_p]),
        ("llama_backend_init", None, []),
        ("llama_model_default_params", Opaque, []),
        ("llama_model_load_from_file", c_void_p, [c_char_p, Opaque]),
        ("llama_model_get_vocab", c_void_p, [c_void_p]),
        ("llama_vocab_n_tokens", c_int32, [c_void_p]),
        ("llama_model_n_embd", c_int32, [c_void_p]),
        ("llama_tokenize", c_int32, [c_void_p, c_char_p, c_int32, ids, c_int32, c_bool, c_bool]),
        ("llama_context_default_params", Opaque, []),
        ("llama_init_from_model", c_void_p, [c_void_p, Opaque]),
        ("llama_set_n_threads", None, [c_void_p, c_int32, c_int32]),
        ("llama_set_embeddings", None, [c_void_p, c_bool]),
        ("llama_batch_get_one", Opaque, [ids, c_int32]),
        ("llama_encode", c_int32, [c_void_p, Opaque]),
        ("llama_decode", c_int32, [c_void_p, Opaque]),
        ("llama_get_embeddings_seq", POINTER(c_float), [c_void_p, c_int32]),
        ("llama_get_logits_ith", POINTER(c_float), [c_void_p, c_int32]),
        ("llama_get_memory", c_void_p, [c_void_p]),
        ("llama_memory_clear", None, [c_void_p, c_bool]),
        ("llama_free", None, [c_void_p]),
        ("llama_model_free", None, [c_void_p]),
    ):
        function = getattr(library, name)
        function.restype = result
        function.argtypes = arguments
    library.llama_backend_init()
    library.ggml_backend_load_all_from_path(str(Path(path).parent).encode())
    return library
