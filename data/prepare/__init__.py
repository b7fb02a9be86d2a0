"""Text to token shards, once for all runs; killed, it goes on after the last shard that it finished.
`preparing` is the face, `training_data` decides what is trained; a row goes through `passes`, `encode` and `writing`.
What depends on the kind of data is asked of its task (`data.task`).
"""
