"""What `doctor` reports: `inventory` has the machine's facts, `model_memory` what steps of a model take, `advice` what
follows from both. Of the program only `commands.doctor` imports from here.
"""
