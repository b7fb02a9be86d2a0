"""What `doctor` reports: `inventory` has the facts of the machine, `advice` what follows from them and from plans. Of
the program only `commands.doctor` imports from here.
"""
