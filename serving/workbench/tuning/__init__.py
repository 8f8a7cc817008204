"""Measuring when overlap pays, and writing the settings.

tune     the command `ubatch tune`
measure  a rank's process, and its measuring rounds; the measurements so far, so that a stopped run can be resumed
report   the chosen settings as tables, as a YAML file, and as charts of the measured speed-ups
"""
