"""How answers are written: `generation` is the face.
`choosing` picks one token, `beams` the likeliest answer, `kv_cache` remembers what was computed.
Imports the model; training and commands import from here.
"""
