"""What `doctor` looks at and works out: `inventory` and `trials` find facts, `advice` makes sentences of them.
`doctor --check`: `device_check` has its parts and verdict, `device_numbers` and `device_speed` what runs on the device.
Of the program only `commands.doctor` imports from here.
"""
