"""How answers are written: `generation` is the face.
`choosing` picks one token, `beams` the likeliest answer; `passing` runs the model, `kv_cache` and `running` remember.
Imports the model; training and commands import from here.
"""
