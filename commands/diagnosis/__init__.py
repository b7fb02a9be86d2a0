"""What `doctor` looks at, works out and shows.
`inventory` and `trials` find facts, `advice` makes sentences of them, `page` shows them.
Only `commands.doctor` imports from here.
"""
