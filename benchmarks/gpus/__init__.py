"""A step on a GPU beside Hugging Face: `works` says what runs, `one_system` runs a system in a child process, `speed` compares.
`card` looks at the card from outside. The command is `python -m benchmarks.throughput --device=cuda`.
Imported by that command and tests alone.
"""
