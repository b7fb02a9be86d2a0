"""What a model can be trained on: one file a task, from the columns of a file to the score of an answer.

`settings.tasks` lists them. Importing one needs no torch: what computes is imported where it is used.
"""
