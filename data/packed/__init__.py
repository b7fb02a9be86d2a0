"""What do packed tables claim to become, before anything of them is unpacked?
`parquet_pages` reads page headers, `arrow_buffers` the lengths before packed buffers; `room` says what there is room for.
Imported by `data.sources` and `data.prepare`; imports of `data.sources` only where a file is (`places`).
"""
