"""How answers are written: `generation` is the face; `decoder` runs the model over its `kv_cache`.
`sampling` picks the next tokens, `beam_search` the likeliest answer; `answer_tree` allows those of a list.
Imports the model; training, commands and serving import from here.
"""
