"""Answers of an exported folder in transformers.js in Chromium, on one thread of WebAssembly."""

from __future__ import annotations

import functools
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

PATIENCE = 3000
RUNTIME = (
    "@huggingface/transformers/dist/transformers.min.js",
    "onnxruntime-web/dist/ort-wasm-simd-threaded.mjs",
    "onnxruntime-web/dist/ort-wasm-simd-threaded.wasm",
)
SCRIPT = """
const [sources, newTokens, done] = arguments;
async function answers() {
  const js = await import("/transformers.min.js");
  js.env.allowLocalModels = true;
  js.env.allowRemoteModels = false;
  js.env.localModelPath = "/";
  js.env.useBrowserCache = false;
  js.env.backends.onnx.wasm.wasmPaths = {
    mjs: location.origin + "/ort-wasm-simd-threaded.mjs",
    wasm: location.origin + "/ort-wasm-simd-threaded.wasm",
  };
  js.env.backends.onnx.wasm.numThreads = 1;
  const model = await js.AutoModelForSeq2SeqLM.from_pretrained("model", { dtype: "fp32", device: "wasm" });
  const found = [];
  for (const ids of sources) {
    const shape = [1, ids.length];
    const inputs = new js.Tensor("int64", BigInt64Array.from(ids.map(BigInt)), shape);
    const attention_mask = new js.Tensor("int64", new BigInt64Array(ids.length).fill(1n), shape);
    const answer = await model.generate({ inputs, attention_mask, max_new_tokens: newTokens });
    found.push(answer.tolist()[0].map(Number));
  }
  return found;
}
answers().then(done, error => done(String(error.stack ?? error)));
"""


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


def answers_in_chromium(
    folder: Path, modules: Path, room: Path, sources: list[list[int]], new_tokens: int
) -> list[list[int]]:
    """Greedy answers with their start token.

    Args:
        modules: `node_modules` with transformers.js. room: an empty folder, which is served.
    """
    from selenium import webdriver

    (room / "index.html").write_text("<!doctype html><title>answers</title>")
    (room / "model").symlink_to(folder)
    for path in RUNTIME:
        (room / Path(path).name).symlink_to(modules / path)
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=str(room)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    options = webdriver.ChromeOptions()
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(flag)
    browser = webdriver.Chrome(options=options)
    try:
        browser.set_script_timeout(PATIENCE)
        browser.command_executor.client_config.timeout = PATIENCE  # type: ignore[union-attr]
        browser.get(f"http://127.0.0.1:{server.server_address[1]}/")
        found = browser.execute_async_script(SCRIPT, sources, new_tokens)
    finally:
        browser.quit()
        server.shutdown()
        server.server_close()
    assert isinstance(found, list), found
    return found
