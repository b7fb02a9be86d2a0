"""Token rows on disk: `writer` writes them, `store` knows what a folder holds and whether it is whole.
Imported by `prepare`, `batches` and training.
"""
