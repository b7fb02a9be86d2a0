"""The processes of a run: `launch` says which one this is, `group` lets them agree, `interrupts`
turns a signal into an orderly end.
`launch` and `interrupts` load no torch, so that a refusal can ask before it.
"""
