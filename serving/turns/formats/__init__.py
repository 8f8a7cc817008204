"""Formats in which models write tool calls: a file for each kind, which says how the calls look."""
