"""Which few weights learn: `adapter` puts thin matrices beside frozen ones.
`freezing` chooses by name what else does not learn.
Imports the model; its formats, training and commands import from here.
"""
