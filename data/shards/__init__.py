"""Token rows on disk: `writer` writes them, `store` knows what a folder holds and whether it is whole.
`token_rows` tells ids that the tokenizer does not know.
Imported by `prepare`, `batches` and training.
"""
