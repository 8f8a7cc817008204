"""Predict steps on machines that are not at hand, from cost tables, the runtime's own schedules and the simulator.

`simulate` is the command `ubatch simulate`. `constants.yaml` holds every constant with its source.
"""
