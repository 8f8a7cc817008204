"""Which ranks share what.

tensor_parallel    attention and dense MLPs: who has which heads and rows
transport          experts: which all-to-all is taken, and which schedules it serves
"""
