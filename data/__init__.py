"""Text to batches. `dataset` reads single rows of files of any size in constant memory.
Folders: `sources`, `text`, `tokenizers`, `prepare`, `shards`, `batches`.
Nothing here imports torch or `model`; engine, training and commands import from every folder.
"""
