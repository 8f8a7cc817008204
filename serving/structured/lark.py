"""Grammars that users write, in Lark's or GBNF's notation: what is checked before the library reads them."""

from __future__ import annotations

import re
from collections.abc import Iterator

from model_runner import RequestError
from ubatch.errors import shown

_PIECE = re.compile(
    r"""(?P<text>"(?:\\.|[^"\\\n])*")|(?P<regex>/(?![/*])(?:\\.|[^/\\\n])+/)|(?P<comment>//[^\n]*|\#[^\n]*)"""
    r"""|(?P<special><[^>\s]+>)|(?P<name>[A-Za-z_][\w-]*)[ \t]*\[(?P<options>[^\]\n]*)\]""",
    re.VERBOSE,
)
_UNDONE = re.compile(r"\b(max_tokens|temperature|stop|stop_capture)\s*=")
_LARK = re.compile(r"(?m)^\s*(?:%llguidance\b|start\s*(?:\[[^\]\n]*\])?\s*:(?!:=))")


def lark_text(grammar: str) -> str:
    """A user's grammar in Lark's notation, as llguidance reads it.

    Raises:
        RequestError: it is not in Lark's or GBNF's notation, or asks for what a server does not do.
    """
    if not _LARK.search(grammar):
        grammar = _from_gbnf(grammar)
    for options in _found(grammar, "options"):
        if (undone := _UNDONE.search(options)) is not None:
            raise RequestError(
                f"the option {undone[1]} of a rule is not supported: it does not go with tokens guessed ahead. Use "
                f"lazy or suffix, and the request's own max_tokens, stop and temperature."
            )
    return grammar


def special_tokens(grammar: str) -> list[str]:
    """The special tokens that a Lark grammar names, such as `<|im_end|>`; not those given by their ids (`<[5]>`)."""
    return [name for name in _found(grammar, "special") if not name.startswith("<[")]


def _found(grammar: str, kind: str) -> Iterator[str]:
    return (found[kind] for found in _PIECE.finditer(grammar) if found[kind] is not None)


def _from_gbnf(grammar: str) -> str:
    from llguidance.gbnf_to_lark import gbnf_to_lark

    if "::=" not in grammar:
        raise RequestError(
            "the grammar needs a rule 'start: ...' (Lark) or 'root ::= ...' (GBNF); it has neither. What it begins "
            f"with is {shown(grammar[:100])}."
        )
    try:
        text: str = gbnf_to_lark(grammar)
    except RecursionError:
        raise RequestError("the grammar is nested too deeply.") from None
    except Exception as error:  # the library raises no narrower type
        raise RequestError(f"the grammar cannot be read as GBNF: {str(error)[:200]}") from error
    return text
