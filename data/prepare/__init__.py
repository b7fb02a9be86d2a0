"""Text to token shards, once for all runs; killed, it goes on after the last shard that it finished.
`preparing` is the face, `task` decides what is learnt; a row goes through `passes`, `encode` and `writing`.
Imported by training and commands through `preparing` and `task`.
"""
