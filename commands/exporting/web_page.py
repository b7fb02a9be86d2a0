"""A T5 as a folder for any web server: the ONNX files, and a page that answers in the browser.

The page is `page.html` with facts of the model in it. It runs the model by transformers.js and the WebAssembly of
onnxruntime-web, on the CPU of whoever opens it. Both come from a copy beside the page, or from a public address; the
browser then compares their hashes. Of the builds of onnxruntime-web it is the one without WebGPU, half as large.
"""

from __future__ import annotations

import html
import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from commands.exporting import onnx_files
from commands.exporting.exported import Exported
from model.formats.headers import read_json
from model.formats.heads import label_names
from model.formats.shape_file import CONFIG_FILE
from settings.declared import GenerateConfig, T5ModelConfig
from settings.errors import UserError
from support.units import format_size

USE = "{python} -m http.server --directory {folder}"
PAGE = "index.html"
TEMPLATE = Path(__file__).with_name("page.html")
SUBFOLDER = "js"
WASM_FOLDER = Path("node_modules/onnxruntime-web/dist")  # npm puts it there, beside transformers.js
# transformers.js loads these beside the graphs.
READ_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
MOST_FILE_BYTES = 2**31  # Chromium 156 reads no larger file at once.
SHARES = {"none": 1.0, "fp16": 0.5, "int8": 0.25, "q4": 0.25}  # Of fp32; tables are int8 in q4.
check = onnx_files.check  # The page itself runs in browsers alone.


@dataclass(frozen=True)
class RuntimeFile:
    """A file of what runs the model.

    Args:
        path: an address, or relative to the page. bytes: its size. integrity: its hash; None: it is not compared.
    """

    path: str
    bytes: int
    integrity: str | None = None


CDN = "https://cdn.jsdelivr.net/npm"
# The version that transformers.js 4.3.2 was built with.
ONNXRUNTIME = f"{CDN}/onnxruntime-web@1.31.0-dev.20260914-8d85527a0/dist"
PUBLIC = {
    "library": RuntimeFile(
        f"{CDN}/@huggingface/transformers@4.3.2/dist/transformers.min.js",
        587_917,
        "sha384-xFDNfwR3J/vPYzGjMr1VSM8LHIcA+ii2Ha4x+6WAuISKpT9I0dxgF/mVQW+I0kSd",
    ),
    "loader": RuntimeFile(
        f"{ONNXRUNTIME}/ort-wasm-simd-threaded.mjs",
        24_381,
        "sha384-rwgdUeIyqfd2lxMuhdqXYPnZiluDqSM5liz/q+ulIt4vYtB52NCoTVWBkm1KFOeN",
    ),
    "wasm": RuntimeFile(
        f"{ONNXRUNTIME}/ort-wasm-simd-threaded.wasm",
        14_264_838,
        "sha384-LrOPe1yNsLVzhsriuQfxO06RWx/XakR0S8uiOMx7HVJP6N/IEaR1EAgJMFeTanif",
    ),
}


def bytes_beside(shape: T5ModelConfig, precision: str) -> int:
    """See `onnx_files.bytes_beside`.

    Raises:
        UserError: a package is missing, or a browser cannot read a file as large as this model's would be.
    """
    largest = int(max(onnx_files.graph_bytes(shape)) * SHARES[precision])
    if largest >= MOST_FILE_BYTES:
        raise UserError(
            "--format = web, a file of the page would have {size}, and browsers read at most {most} at once; "
            "--quantize=int8 makes a quarter of fp32, or use a smaller model",
            size=format_size(largest),
            most=format_size(MOST_FILE_BYTES),
        )
    return onnx_files.bytes_beside(shape, precision)


def write(exported: Exported, folder: Path) -> Path:
    """Write the ONNX files, the page, and a copy of what runs them where one is given.

    Returns:
        the page.
    Raises:
        UserError: a package is missing, the copy of transformers.js is not whole, or the page cannot prepare texts as
            the model was trained.
    Memory: as `onnx_files.write`.
    """
    if exported.prepare_text != "none":
        raise UserError(
            "--format = web, the page does not prepare texts by --prepare_text={prepare_text} as this model was "
            "trained; use --format=onnx and prepare them in your own page",
            prepare_text=exported.prepare_text,
        )
    runtime = PUBLIC if exported.js is None else _copied(Path(exported.js), folder / SUBFOLDER)
    onnx_files.write(exported, folder)
    config = exported.model.config
    vocabulary = exported.vocabulary
    template = exported.template
    before, after = template.text_around_question()
    facts = {
        "head": config.head,
        "labels": label_names(read_json(folder / CONFIG_FILE)) if config.label_names else [],
        "dtype": "fp32" if exported.quantize == "none" else exported.quantize,
        "bytes": sum(path.stat().st_size for path in _downloaded(exported.quantize, folder)),
        "before": template.prefix + before,
        "after": after,
        "prompts": [exported.query_prompt or "", exported.document_prompt or ""],
        "roles": [vocabulary.pad_id, vocabulary.eos_id, vocabulary.unk_id],
        "max_new_tokens": GenerateConfig().max_new_tokens,
        "runtime": {name: asdict(file) for name, file in runtime.items()},
    }
    page = TEMPLATE.read_text(encoding="utf8").replace("{{name}}", html.escape(exported.name))
    # Inside of a script element nothing but its end is read, which no text may bring.
    page = page.replace("{{facts}}", json.dumps(facts, ensure_ascii=False).replace("</", "<\\/"))
    path = folder / PAGE
    path.write_text(page, encoding="utf8")
    return path


def _downloaded(quantize: str, folder: Path) -> Iterator[Path]:
    """The files of the model that the page downloads."""
    for name in READ_FILES:
        if (folder / name).is_file():
            yield folder / name
    yield from onnx_files.graph_files(folder, "fp32" if quantize == "none" else quantize)


def _copied(source: Path, target: Path) -> dict[str, RuntimeFile]:
    """Copy transformers.js and the WebAssembly that it runs."""
    folders = [source, *(folder / WASM_FOLDER for folder in source.resolve().parents)]
    files = dict[str, RuntimeFile]()
    target.mkdir()
    for role, public in PUBLIC.items():
        name = public.path.rpartition("/")[2]
        path = next((folder / name for folder in folders if (folder / name).is_file()), None)
        if path is None:
            raise UserError(
                "--js = {source}, has no {name}, and there is none in {folder} around it; run: npm install "
                "--ignore-scripts @huggingface/transformers@4.3, and give node_modules/@huggingface/transformers/dist",
                source=source,
                name=name,
                folder=WASM_FOLDER,
            )
        shutil.copyfile(path, target / name)
        files[role] = RuntimeFile(f"{SUBFOLDER}/{name}", path.stat().st_size)
    return files
