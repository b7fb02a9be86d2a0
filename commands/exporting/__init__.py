"""A trained model in the formats of other programs: `gguf_file` (llama.cpp), `ctranslate2_folder`, `onnx_folder`.
`vocabulary` reads a tokenizer as they want it, `onnx_graph` says the model in operations, `checking` runs what was
written. Imported by `commands.export` alone; may import what commands may.
"""
