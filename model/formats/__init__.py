"""How weights lie in files: one file a format, and what they share.
`tensor_files` is safetensors, `pickle_files` what is older, `peft` an adapter's folder, `checksums` tells damage;
without torch `headers`, `shape_file` and `adapter_folder` tell what lies in a folder.
`model.hf_format` uses them all; training and commands import from here too.
"""
