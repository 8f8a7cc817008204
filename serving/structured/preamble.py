"""What an output may begin with before its form comes: the reasoning, as a family marks it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from model_runner import RequestError
from serving.structured.writing import ANYTHING


@dataclass(frozen=True)
class Preamble:
    """Text between two marks.

    Attributes:
        begin: the mark before it, without which there is none.
        end: the mark behind it.
        begun: it has begun already.
    """

    begin: str
    end: str
    begun: bool = False

    def rules(self, form: str, special: Mapping[str, int]) -> str:
        """The grammar's first rules. `special`: the added tokens by their texts; they are no part of texts."""
        number = special.get(self.end)
        if number is None:
            lines = f"before[suffix={json.dumps(self.end)}]: {ANYTHING}"
        else:
            lines = f"before: text <[{number}]>\ntext: {ANYTHING}"
        start = "begin? before" if self.begun else "(begin before)?"
        return f'start: {start} {form}\nbegin: "\\n"? {_mark(self.begin, special)}\n{lines}'


@dataclass(frozen=True)
class Messages:
    """Messages of harmony: any of analysis, and then the final one, which is the form."""

    def rules(self, form: str, special: Mapping[str, int]) -> str:
        """See `Preamble`.

        Raises:
            RequestError: the tokenizer does not have harmony's marks.
        """
        names = ("start", "channel", "message", "end")
        if missing := [name for name in names if f"<|{name}|>" not in special]:
            raise RequestError(f"the model's tokenizer has no special token <|{missing[0]}|>, which harmony needs.")
        start, channel, message, end = (_mark(f"<|{name}|>", special) for name in names)
        return (
            f'start: analysis* {channel} "final" {message} {form}\n'
            f'analysis: {channel} "analysis" {message} text {end} {start} "assistant"\ntext: {ANYTHING}'
        )


def _mark(text: str, special: Mapping[str, int]) -> str:
    number = special.get(text)
    return json.dumps(text) if number is None else f"<[{number}]>"
