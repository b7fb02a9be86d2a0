"""The peer of the API: transformers' `generate()`, a request at a time, behind the same HTTP layer.

`python -m benchmarks.parts.serving_peer FOLDER TOKENS` serves a model folder until SIGTERM. Its own server,
`transformers serve`, takes what a model writes for a continuation of the prompt and cuts the prompt's length off, so
answers of encoder-decoders come out short, and its continuous batching is for decoders alone (seen in 5.23).
"""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import torch

from common.web.listening import address_of, listen, server_of
from memory.monitor import Monitor
from serving.answers import Answer
from serving.app import make_app
from serving.engine import AnswerEngine, Capacity
from serving.server import api_of
from settings.loading import load
from training.loaded_model import load_model
from training.saved_model import find_model


class OneByOne(AnswerEngine):
    """Answers in their order, each by `generate()` of transformers."""

    def __init__(self, folder: Path, like: AnswerEngine) -> None:
        from transformers import AutoModelForSeq2SeqLM

        super().__init__(like.decoder, Capacity(1, 0, {}), Monitor(1, like._device), like._device)
        self._peer = AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
        self._asked = queue.SimpleQueue[Answer | None]()
        self._thread = threading.Thread(target=self._answer_all, daemon=True)

    def submit(self, answers: Sequence[Answer]) -> None:
        for answer in answers:
            self._asked.put(answer)

    def stop(self) -> None:
        self._asked.put(None)
        self._thread.join()

    def _answer_all(self) -> None:
        while (answer := self._asked.get()) is not None:
            assert self.decoder is not None
            try:
                with torch.no_grad():
                    ids = torch.tensor([answer.ids])
                    written = self._peer.generate(
                        input_ids=ids, max_new_tokens=answer.settings.max_new_tokens, do_sample=False
                    )
                for token in written[0, 1:].tolist():
                    if not answer.is_done:
                        answer.take(token, self.decoder.model.config.eos_token_id)
            except Exception as error:  # told to the client, so that the benchmark fails there
                answer.finish(problem=f"{type(error).__name__}: {error}")
            self.hand_over()


def main(arguments: list[str]) -> None:
    """Serve until SIGTERM."""
    folder, tokens = arguments
    config = load("serve", {"model": folder, "max_new_tokens": tokens, "max_seq_len": "512"})
    api = api_of(load_model(config, find_model(config)), config.data, config.generate)
    api.engine = OneByOne(Path(folder), api.engine)
    listener = listen("127.0.0.1", 0)
    print(f"serving at {address_of('127.0.0.1', listener)}/v1", flush=True)
    server_of(make_app(api), 1).run(sockets=[listener])


if __name__ == "__main__":
    main(sys.argv[1:])
