"""Will it fit? In front: `plan` chooses, `probe` measures it, `cleanup` and `recovery` keep it true.
`alternatives` and `refusal` say what else could be done, `machines` for which machine; rooms: `cost`, `observe`.
Imports devices and settings alone; engine, training and commands import from here.
"""
