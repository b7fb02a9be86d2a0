"""The page in the browser: runs listed and shown, started and planned, models to talk with.

Its own process, which never imports torch; it talks to runs through files and child processes.
From outside only `train_low_mem.py` imports it; it imports config, settings and units alone.
"""
