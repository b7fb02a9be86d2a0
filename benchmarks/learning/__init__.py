"""Studies behind defaults and presets, each a command.
`rates` finetunes one base, and random weights of its shape, at several learning rates.
Imported by tests only.
"""
