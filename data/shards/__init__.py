"""Token rows on disk: `store` writes and reads them.
`checksums` tells damage, `token_rows` ids that the tokenizer does not know.
Imported by `prepare`, `batches` and training.
"""
