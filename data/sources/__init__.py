"""Rows out of files, local, remote or packed:
`files` finds and tells apart, `reader` reads any format by the table in `formats`, `layouts` says which columns are
learnt, `reading` gives rows of them, `peek` the first ones. Imports `data.text` for rows with turns and labels.
"""
