"""Formats in which models write tool calls: a file each, which says how its calls look."""
