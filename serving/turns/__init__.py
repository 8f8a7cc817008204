"""An assistant's turn, read from generated text as it arrives: content, reasoning and tool calls.

reading      a text that is read while it arrives, by generators
marked       a turn whose parts are marked in its text: what all formats share
json_calls   calls that are JSON, piece by piece
formats      how each family writes calls
parsers      all by name, the reasoning at the beginning, `make_turn_parser`; which format a chat template shows
"""
