"""What a row says: `clean` and `duplicates` choose rows, `templates` and `conversations` make pairs of them.
`preferences` asks whether a pair of answers can teach anything; `cells` reads lists in text, `labels` labels,
`proteins` prepares sequences. Imported by `sources`, `tokenizers` and `prepare`; the commands take `templates`.
"""
