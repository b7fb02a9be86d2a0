"""What is trained: `t5`, a row of blocks, from `attention`, `layers`, `rows`, `dropout`, and its `loss`; `label_head`
classifies and scores instead. In front of the rooms `lora`, `decoding`, `formats` stands `hf_format`: load and save a
Hugging Face folder. Imports devices and settings alone; engine, training and commands import from here.
"""
