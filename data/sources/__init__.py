"""Which files are meant, and how do rows come out of them? Local, remote, packed, broken.
`files` finds and tells apart, `reading` gives rows of any format; a format's own reader stands beside it.
Imported by most rooms of `data`; imports `data.text.conversations` for rows with turns.
"""
