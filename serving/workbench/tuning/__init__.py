"""Measuring when overlap pays, and writing the settings.

tune     the command `ubatch tune`
rank     a rank's process, and what it exchanges with the command
measure  the measuring rounds, on every rank; the measurements so far, so that a stopped run can be resumed
report   the chosen settings as tables and as a YAML file
plot     charts of the measured speed-ups
"""
