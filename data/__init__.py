"""Text to batches. `dataset` is the face: one row of files of any size in flat memory.
Rooms: `sources`, `text`, `tokenizers`, `prepare`, `shards`, `batches`.
No torch here, and nothing of `model`; engine, training and commands import from every room.
"""
