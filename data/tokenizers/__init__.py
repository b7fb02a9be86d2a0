"""Text to token ids and back: `tokenizer` is what all others use.
`training` makes one in bounded memory; `published` and `spiece` read those of others; `pieces` shows text as it is
written. Imports `data.text.templates` and `data.batches.order`; the other folders of `data`, training and commands
import from here.
"""
