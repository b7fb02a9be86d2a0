"""How the processes of a run stay together: `launch` says who this one is, `collectives` agree.
`peers` ends all when one fails, `interrupts` turns a signal into an orderly end.
Imports `report` alone; `launch` imports nothing, so that a refusal can ask before torch is loaded.
"""
