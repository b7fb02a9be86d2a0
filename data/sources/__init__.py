"""Rows out of files, local, remote or packed:
`files` finds and tells apart, `reading` gives rows of any format; a format's own reader stands beside it.
Imports `data.text.conversations` for rows with turns.
"""
