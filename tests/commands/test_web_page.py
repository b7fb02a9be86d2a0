"""The page that answers in a browser: what is written, and in a real Chromium what it answers.

The browser's tests need `FRUGALT5_TRANSFORMERS_JS`, a folder `node_modules` with `@huggingface/transformers`.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from commands.export import export
from commands.generate import generate as generate_command
from data.text.templates import Template
from data.tokenizers.tokenizer import Tokenizer
from data.tokenizers.training import train_tokenizer
from model import hf_format
from model.decoding.generation import generate
from serving.model import Model
from settings.declared import T5ModelConfig
from settings.errors import UserError
from settings.precedence import model_presets
from settings.tasks import MODEL_HEADS
from tests.commands.small import encoder, flags_of, read_rows, write_rows

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytestmark = pytest.mark.filterwarnings("ignore")
MODULES = os.environ.get("FRUGALT5_TRANSFORMERS_JS", "")
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
in_browser = pytest.mark.skipif(
    not (MODULES and BROWSER and DRIVER), reason="needs FRUGALT5_TRANSFORMERS_JS, chromium and chromedriver"
)
LIBRARY = "@huggingface/transformers/dist"
WASM = "onnxruntime-web/dist"
FILES = {
    "transformers.min.js": LIBRARY,
    "ort-wasm-simd-threaded.mjs": WASM,
    "ort-wasm-simd-threaded.wasm": WASM,
}
VOID_TAGS = {"meta", "link", "br", "input"}
PATIENCE = 120


def test_files_that_no_browser_reads_are_refused_before_they_are_written() -> None:
    from commands.exporting.web_page import bytes_beside

    large = T5ModelConfig(**model_presets()["t5-v1.1-3b"])
    with pytest.raises(UserError, match="int8"):
        bytes_beside(large, "none")
    assert bytes_beside(T5ModelConfig(**model_presets()["t5-v1.1-base"]), "none") > 0


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What npm leaves of transformers.js, without its content."""
    modules = tmp_path_factory.mktemp("npm") / "node_modules"
    for name, folder in FILES.items():
        (modules / folder).mkdir(parents=True, exist_ok=True)
        (modules / folder / name).write_text(f"// {name}")
    return modules / LIBRARY


def page_of(model: Path, output: Path, **flags: Any) -> tuple[str, dict[str, Any]]:
    """The page of a model, and the facts in it."""
    export(flags_of("export", model=model, output=output, format="web", **flags))
    text = (output / "index.html").read_text(encoding="utf8")
    facts = re.search(r'<script type="application/json" id="facts">(.*?)</script>', text, re.DOTALL)
    assert facts is not None
    return text, json.loads(facts[1])


class Tags(HTMLParser):
    """Tags that are open, each of which has to be closed in its turn."""

    def __init__(self) -> None:
        super().__init__()
        self.open = list[str]()

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag not in VOID_TAGS:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_with_a_copy_of_the_library_the_page_needs_nothing_from_elsewhere(
    folder: Path, library: Path, tmp_path: Path
) -> None:
    page = tmp_path / "page"
    text, facts = page_of(folder, page, quantize="int8", js=library)
    assert {*re.findall(r"https?://[\w.:/-]+", text)} == {"http://localhost:8000"}
    for file in facts["runtime"].values():
        assert (page / file["path"]).stat().st_size == file["bytes"]
    assert {path.name for path in (page / "js").iterdir()} == FILES.keys()
    assert facts["dtype"] == "int8"
    names = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]
    names += ["onnx/encoder_model_int8.onnx", "onnx/decoder_model_merged_int8.onnx"]
    assert facts["bytes"] == sum((page / name).stat().st_size for name in names if (page / name).exists())
    assert folder.name in text and "{{" not in text


def test_without_one_it_names_one_version_and_its_hashes(folder: Path, tmp_path: Path) -> None:
    text, facts = page_of(folder, tmp_path / "page")
    files = facts["runtime"].values()
    assert all(file["path"].startswith("https://cdn.jsdelivr.net/npm/") for file in files)
    assert all(file["integrity"].startswith("sha384-") for file in files)
    assert "/@huggingface/transformers@4.3." in facts["runtime"]["library"]["path"]
    assert facts["dtype"] == "fp32" and not (tmp_path / "page" / "js").exists()
    tags = Tags()
    tags.feed(text)
    tags.close()
    assert not tags.open


def test_every_text_of_the_page_is_there_in_both_languages(folder: Path, tmp_path: Path) -> None:
    text, _ = page_of(folder, tmp_path / "page")
    words: list[dict[str, str]] = []
    for language in ("en", "zh"):
        table = re.search(rf"const {language} = \{{\n(.*?)\n\}};", text, re.DOTALL)
        assert table is not None
        words.append(dict(re.findall(r'^  (\w+): "(.*)",$', table[1], re.MULTILINE)))
        assert len(words[-1]) == table[1].count("\n") + 1
    english, chinese = words
    assert english.keys() == chinese.keys()
    for key, sentence in english.items():
        assert {*re.findall(r"\{\w+\}", sentence)} == {*re.findall(r"\{\w+\}", chinese[key])}
    used = {*re.findall(r'"(\w+)"', text), *(f"input_{head}" for head in MODEL_HEADS)}
    assert {*re.findall(r'\b(?:say|fail|problem)\("(\w+)"', text)} <= english.keys() <= used


def test_a_question_is_worded_as_the_model_learnt_it(folder: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(folder, model)
    Template.load("Q: {prompt}\n</script>A:", "tell: ").save(model)
    _, facts = page_of(model, tmp_path / "page")
    assert (facts["before"], facts["after"]) == ("tell: Q: ", "\n</script>A:")


def test_labels_have_the_names_that_are_published(tmp_path: Path) -> None:
    model = encoder(tmp_path, head="sequence", labels="2")
    path = model / "config.json"
    names = {"0": "Food, drink", "1": "Sports"}
    path.write_text(json.dumps({**json.loads(path.read_text()), "id2label": names}))
    _, facts = page_of(model, tmp_path / "page")
    assert facts["labels"] == ["Food, drink", "Sports"]
    _, facts = page_of(encoder(tmp_path / "other", head="sequence", labels="regression"), tmp_path / "numbers")
    assert facts["labels"] == []


def test_what_cannot_work_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"npm install --ignore-scripts @huggingface/transformers@4\.3"):
        page_of(folder, tmp_path / "page", js=tmp_path / "empty")
    model = encoder(tmp_path, head="token", labels="C,E,H")
    (model / "settings.json").write_text(json.dumps({"prepare_text": "prott5"}))
    with pytest.raises(UserError, match="--prepare_text=prott5"):
        page_of(model, tmp_path / "page")
    assert not (tmp_path / "page").exists()


class Page:
    """A folder that is served, and a browser that looks at it."""

    def __init__(self, browser: Any) -> None:
        self.browser = browser

    def open(self, folder: Path) -> None:
        """Serve a folder, and wait until its model can be asked."""

        class Handler(SimpleHTTPRequestHandler):
            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(folder)))
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.browser.get(f"http://127.0.0.1:{self.server.server_address[1]}/")
        self.wait("!document.getElementById('form').hidden")

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def wait(self, condition: str) -> None:
        """Wait until a condition of the page holds, or it says that something failed."""
        from selenium.webdriver.support.ui import WebDriverWait

        script = f"return {condition} || !document.getElementById('error').hidden"
        WebDriverWait(self.browser, PATIENCE, 0.1).until(lambda browser: browser.execute_script(script))
        assert self.browser.execute_script("return document.getElementById('error').textContent") == ""

    def answer(self, first: str, second: str = "") -> list[str]:
        """The parts of the answer to a text, or to two."""
        self.browser.execute_script(
            "document.getElementById('first').value = arguments[0];"
            "document.getElementById('second').value = arguments[1]; document.getElementById('ask').click()",
            first,
            second,
        )
        self.wait("!document.getElementById('ask').disabled")
        parts = "return [...document.getElementById('answer').children].map((part) => part.textContent)"
        return list(self.browser.execute_script(parts))


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    from selenium.webdriver import Chrome, ChromeOptions, ChromeService

    options = ChromeOptions()
    options.binary_location = str(BROWSER)
    for flag in ("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "lang=en-US"):
        options.add_argument(f"--{flag}")
    browser = Chrome(options=options, service=ChromeService(DRIVER))
    yield Page(browser)
    browser.quit()


@pytest.mark.slow
@pytest.mark.timeout(600)
@in_browser
def test_the_browser_writes_the_same_answers(page: Page, folder: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(folder, model)
    (model / "generation_config.json").write_text('{"max_new_tokens": 12}')
    page_of(model, tmp_path / "page", js=Path(MODULES) / LIBRARY)
    tokenizer = Tokenizer.load(model)
    page.open(tmp_path / "page")
    for text in ("a river", "二〇三五年十月一日", "<extra_id_0> runs"):
        (ids,) = tokenizer.encode_prompts([text])
        (answer,) = generate(hf_format.load(model), [[*ids.tolist(), tokenizer.eos_id]], max_new_tokens=12)
        assert page.answer(text) == [tokenizer.decode_answer(answer) or "(an empty answer)"]
    page.close()


def with_tokenizer(kind: str, model: Path) -> Path:
    """The model with another tokenizer than that of bytes."""
    if kind != "byte":
        train_tokenizer(["a river runs under a bridge, and it's 3 o'clock; 中文"] * 50, kind, 700, 2**20).save(model)
    return model


def labelled(folder: Path, model: Path, texts: list[str]) -> list[dict[str, Any]]:
    """What `generate` says of texts."""
    rows = write_rows(folder / "texts.jsonl", ({"text": text} for text in texts))
    output = folder / "answers.jsonl"
    generate_command(flags_of("generate", model=model, input=rows, output=output, mixed_precision="no"))
    return read_rows(output)


@pytest.mark.slow
@pytest.mark.timeout(600)
@in_browser
@pytest.mark.parametrize("kind", ["byte", "unigram"])
def test_the_browser_gives_labels_the_same_probabilities(page: Page, kind: str, tmp_path: Path) -> None:
    model = with_tokenizer(kind, encoder(tmp_path, head="sequence", labels="sad,glad,odd", vocab_size=720))
    page_of(model, tmp_path / "page", js=Path(MODULES) / LIBRARY)
    page.open(tmp_path / "page")
    for row in labelled(tmp_path, model, ["a river runs", "it's 3; 中文", "Ünknown ½ letters  🍣"]):
        shares = sorted(row["probabilities"].items(), key=lambda pair: -pair[1])
        assert page.answer(row["text"]) == [f"{label}{share:.4f}" for label, share in shares]
    page.close()


@pytest.mark.slow
@pytest.mark.timeout(600)
@in_browser
@pytest.mark.parametrize("kind", ["byte", "unigram"])
def test_the_browser_marks_the_same_words_or_letters(page: Page, kind: str, tmp_path: Path) -> None:
    model = with_tokenizer(kind, encoder(tmp_path, head="token", labels="O,PER,LOC", vocab_size=720))
    page_of(model, tmp_path / "page", js=Path(MODULES) / LIBRARY)
    page.open(tmp_path / "page")
    for row in labelled(tmp_path, model, ["Anna lives in Old Berlin", "a river ½", "中文字", "bridge"]):
        is_words = len(row["labels"]) < len(row["text"])
        units = row["text"].split() if is_words else row["text"]
        marks = [unit + label.removeprefix("O") for unit, label in zip(units, row["labels"], strict=True)]
        assert page.answer(row["text"]) == [(" " if is_words else "").join(marks)]
    page.close()


@pytest.mark.slow
@pytest.mark.timeout(600)
@in_browser
@pytest.mark.parametrize("head", ["none", "embedding"])
def test_the_browser_compares_texts_by_the_same_vectors(head: str, page: Page, tmp_path: Path) -> None:
    """With an embedding head, the first text is the query."""
    model = encoder(tmp_path, head=head, **({"embedding_size": 12} if head == "embedding" else {}))
    (model / "settings.json").write_text('{"query_prompt": "ask: ", "document_prompt": "text: "}')
    page_of(model, tmp_path / "page", js=Path(MODULES) / LIBRARY)
    texts = ["a river runs", "中文字"]
    names = ("query", "document")
    first, second = (Model(model).embed([text], prompt_name=name)[0] for text, name in zip(texts, names, strict=True))
    cosine = first @ second / np.linalg.norm(first) / np.linalg.norm(second)
    page.open(tmp_path / "page")
    assert page.answer(*texts) == [f"Its vector has {len(first)} numbers.", f"Cosine of the two vectors: {cosine:.4f}"]
    page.close()
