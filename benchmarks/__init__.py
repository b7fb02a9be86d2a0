"""Side by side with peers: one command each, `python -m benchmarks.NAME`; results go to docs/benchmarks.md.
Folders: `parts`, what commands share and start as children; `gpus`, steps on a GPU; `traced`, steps on none; `faults`,
kills and failing disks; `checks`, of the tests.
Nothing imports from here.
"""
