"""Steps on a GPU beside Hugging Face T5: `__main__` runs one system after the other in child processes (`one_system`)
on the steps of `works`. Imported by `python -m benchmarks.gpus` and tests alone.
"""
