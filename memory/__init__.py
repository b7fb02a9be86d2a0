"""Will it fit? In front: `plan` takes one of the ways of `choices`, `probe` measures it, `cleanup` and `recovery` keep it true.
`alternatives` says what else could be done, `machines` for which machine; rooms: `cost`, `observe`.
Imports devices and settings alone; engine, training and commands import from here.
"""
