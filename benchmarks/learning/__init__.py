"""What is learnt from which start at which rate? Studies behind defaults and presets, each a command of its own.
`rates` finetunes one base, and random weights of its shape, at several learning rates.
Imported by tests alone.
"""
