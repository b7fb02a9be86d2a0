"""What several benchmarks share: `results`, `children`, `watched`, `rows`; and what they start or show.
`*_peer` and `one_system` run as child processes, `*_page` write tables, `*_data` make rows.
Imported by benchmarks alone.
"""
