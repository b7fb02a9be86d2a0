"""Evaluation of a model: `losses` over held-out rows, `samples` of its answers and their `scores`, `label_scores` of heads.
`stopping` remembers the best evaluation and ends a run that gets no better.
"""
