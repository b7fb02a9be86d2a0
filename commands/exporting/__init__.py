"""A trained model in the formats of other programs: `gguf_file` (llama.cpp), `ctranslate2_folder`, `onnx_folder`.
`vocabulary` reads a tokenizer as they want it; `packages` imports what is optional, or says how to install it.
Imported by `commands.export` alone; may import what commands may.
"""
