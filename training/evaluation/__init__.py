"""How good is the model? `losses` over held-out rows, `samples` of its answers and their `scores`, `label_scores` of heads.
`stopping` remembers the best evaluation and ends a run that gets no better.
Imports `report` and `processes`; later rooms, the trainer and the commands import from here.
"""
