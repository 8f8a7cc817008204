"""How a model is spread over ranks.

tensor_parallel    attention and dense MLPs: which rank has which heads and rows
transport          experts: choice of the all-to-all back end, and the schedules it supports
"""
