"""Where weights rest that are not in the memory they are computed in: a file, or the RAM beside a device.
`resting` is the weight store in front; `places` are the homes, `files` one without a name, `slots` where a block's weights
are while it works. Imports the devices and the model; the engine and the commands import from here.
"""
