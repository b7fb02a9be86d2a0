"""What a run starts from: settings, an earlier run, data and weights become decided facts, then a model and its step.
`beginning` chooses and prepares without torch, `startup` opens it, `resolving` decides what is auto, `building` builds; beside
them adapters, schedules, the reference of preferences, resuming.
Imports `report`, `processes`, `evaluation` and `checkpoints`; is imported by `budget`, the front and the commands.
"""
