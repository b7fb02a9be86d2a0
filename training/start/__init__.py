"""What a run starts from: settings, an earlier run, data and weights become decided facts, then a model and its step.
`startup` decides, `building` builds; beside them adapters, schedules, preference and its reference, resuming.
Imports `report`, `processes`, `evaluation` and `checkpoints`; is imported by `budget`, the front and the commands.
"""
