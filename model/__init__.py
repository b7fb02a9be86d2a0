"""What is trained: `t5`, a row of blocks, from `attention`, `layers`, `rows`, `dropout`, and its `loss`; `label_head`
classifies and scores instead. `hf_format`, which uses the folders `lora`, `decoding` and `formats`, loads and saves a
Hugging Face folder. Imports devices and settings alone; engine, training and commands import from here.
"""
