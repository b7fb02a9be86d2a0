"""Text to token shards, once for all runs; killed, it goes on where it stopped.
`preparing` is the face, `task` decides what is learnt; `encoding`, `encoder`, `spool` do it with `workers` and a `child`.
Imported by training and commands through `preparing` and `task`.
"""
