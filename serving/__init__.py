"""A trained model for other programs: `model` in Python, and the API over it. Requests are queued, written together as
they come, and kept inside the memory budget. `server` opens it, `app` has the addresses, `asking` and `replies`
OpenAI's words, `engine` the running batch in a thread. Only `train_low_mem` imports from here; it imports what commands
may, `commands`, `web`, Starlette.
"""
