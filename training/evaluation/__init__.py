"""Evaluation of a model: `losses` over held-out rows, the `scores` of answers to them (`samples`), `label_scores` of
heads. `answers` writes them. `stopping` remembers the best evaluation and ends a run that gets no better.
"""
