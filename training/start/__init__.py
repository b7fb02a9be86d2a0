"""What a run starts from: settings, an earlier run, data and weights become decided facts, then a model and its step.
`startup` opens what there is, `resolving` decides what is auto, `building` builds; beside them adapters, schedules, preference,
its reference, resuming.
Imports `report`, `processes`, `evaluation` and `checkpoints`; is imported by `budget`, the front and the commands.
"""
