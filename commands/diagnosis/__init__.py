"""What `doctor` looks at and works out: `inventory` and `trials` find facts, `advice` makes sentences of them.
Only `commands.doctor` imports from here.
"""
