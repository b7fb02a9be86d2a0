"""A trained model in the formats of other programs, a file each: `gguf_file` (llama.cpp), `ctranslate2_folder`,
`onnx_files` and `web_page`. `exported` says what is written, `vocabulary` reads a tokenizer as other programs want it,
`onnx_graph` says the model in operations. Imported by `commands.export` alone; may import what commands may.
"""

from __future__ import annotations

import os

# onnxruntime sends events to Microsoft unless this is set before it is loaded (Privacy.md in its package).
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
