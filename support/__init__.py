"""What knows nothing of T5: files, child processes, terminal, language, units, signals, the guard of HTTP servers.

Imports nothing of the other folders but `settings`.
"""
