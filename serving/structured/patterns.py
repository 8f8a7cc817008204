"""Regular expressions in the notation of llguidance's library: as people write them for Python and JSON Schema, and for
the values of JSON Schema's `format`.

Where the dialects differ, the translation matches a part of what Python's `re` matches, so that what is generated also
matches there: `\\d` is an ASCII digit, `\\D` is no digit of any script, and a negated class has no NUL.
"""

import re
from collections.abc import Mapping

from model_runner import RequestError

_QUANTIFIER = re.compile(r"\{(?:\d+(?:,\d*)?|,\d+)\}")
_ALONE: Mapping[str, str] = {
    "d": "[0-9]",
    "D": r"\P{Nd}",
    "w": "[0-9A-Za-z_]",
    "W": r"[^\p{L}\p{N}\p{M}\p{Pc}]",
    "s": r"[\t\n\r\x0B\x0C ]",
    "S": r"[^\s\x1C-\x1F]",
    "Z": r"\z",
    "0": r"\x00",
    "/": "/",
}
_IN_CLASS: Mapping[str, str] = {
    **{letter: text for letter, text in _ALONE.items() if letter != "Z"},
    "d": "0-9",
    "w": "0-9A-Za-z_",
    "s": r"\t\n\r\x0B\x0C ",
    "b": r"\x08",
}
_IN_NEGATED_CLASS: Mapping[str, str] = {
    **_IN_CLASS,
    "d": r"\p{Nd}",
    "D": "[^0-9]",
    "w": r"\p{L}\p{N}\p{M}\p{Pc}",
    "W": "[^0-9A-Za-z_]",
    "s": r"\s\x1C-\x1F",
    "S": r"[^\t\n\r\x0B\x0C ]",
}
_ESCAPED_IN_CLASS = "[&~"
_REFUSED_GROUPS = {
    **dict.fromkeys(("(?=", "(?!"), "look-ahead"),
    **dict.fromkeys(("(?<=", "(?<!"), "look-behind"),
    "(?#": "a comment",
    "(?>": "an atomic group",
    "(?P=": "a reference to a group",
    "(?(": "a conditional group",
}


def translated(regex: str) -> str:
    """A regular expression in llguidance's notation.

    Raises:
        RequestError: it has what a grammar cannot do, such as look-ahead.
    """
    out: list[str] = []
    place, quantified = 0, False
    while place < len(regex):
        sign = regex[place]
        if sign == "\\":
            text, place = _escape(regex, place, _ALONE)
        elif sign == "[":
            text, place = _class(regex, place)
        elif sign == "{":
            text, place = _brace(regex, place)
        elif sign == "(":
            text, place = _group(regex, place), place + 1
        else:
            text, place = sign, place + 1
        if sign == "+" and quantified:
            raise _refused("a possessive quantifier")
        quantified = sign in "*+?" or (sign == "{" and text != r"\{")
        out.append(text)
    return "".join(out)


def in_slashes(regex: str) -> str:
    """A translated regular expression as a terminal of a Lark grammar."""
    if not regex:
        return '""'
    body = re.sub(r"\\.|/|\n|\r", lambda found: _SLASHED.get(found[0], found[0]), regex, flags=re.DOTALL)
    return f"/{body}/"


_SLASHED = {"/": r"\/", "\n": r"\n", "\r": r"\r", "\\\n": r"\n", "\\\r": r"\r"}


def _escape(regex: str, place: int, names: Mapping[str, str]) -> tuple[str, int]:
    letter = regex[place + 1 : place + 2]
    if letter in names:
        return names[letter], place + 2
    if letter and letter in "123456789":
        raise _refused("a reference to a group")
    if letter and letter in "bB":
        raise _refused("a word boundary")
    if letter == "c" and regex[place + 2 : place + 3].isalpha() and regex[place + 2].isascii():
        return f"\\x{ord(regex[place + 2].upper()) - 64:02X}", place + 3
    if letter in ("p", "P", "x", "u"):
        braced = re.compile(r"\\[pPxu](?:\{[^}]*\})?").match(regex, place)
        return (braced[0], braced.end()) if braced is not None else (regex[place : place + 2], place + 2)
    return regex[place : place + 2], place + 2


def _class(regex: str, place: int) -> tuple[str, int]:
    """A class in brackets. Rust's library has nested classes and operators in it, where Python has plain signs."""
    negated = regex.startswith("[^", place)
    names = _IN_NEGATED_CLASS if negated else _IN_CLASS
    out = [r"[^\x00" if negated else "["]  # with all control characters in it, the library takes an escaped quote, too
    place += 2 if negated else 1
    first = True
    while place < len(regex):
        sign = regex[place]
        if sign == "]" and not first:
            return "".join((*out, "]")), place + 1
        first = False
        if sign == "\\":
            text, place = _escape(regex, place, names)
        else:
            text, place = f"\\{sign}" if sign in _ESCAPED_IN_CLASS or sign == out[-1] == "-" else sign, place + 1
        out.append(text)
    raise RequestError("the regular expression has a '[' without its ']'.")


def _brace(regex: str, place: int) -> tuple[str, int]:
    found = _QUANTIFIER.match(regex, place)
    if found is None:
        return r"\{", place + 1
    return found[0].replace("{,", "{0,"), found.end()


def _group(regex: str, place: int) -> str:
    for begin, what in _REFUSED_GROUPS.items():
        if regex.startswith(begin, place):
            raise _refused(what)
    flags = re.compile(r"\(\?([A-Za-z]+)").match(regex, place)
    if flags is not None and not regex.startswith("(?P<", place) and set(flags[1]) - set("ims"):
        raise _refused(f"the flags {flags[1]!r}")
    return "("


def _refused(what: str) -> RequestError:
    return RequestError(f"the regular expression has {what}, which is not supported. Write it without.")


_YEAR = r"(?:000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
_LEAP = r"(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DATE = (
    rf"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    rf"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP}-02-29)"
)
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_HEX = "[0-9A-Fa-f]"
_ENCODED = f"%{_HEX}{{2}}"
_CHAR = rf"(?:[A-Za-z0-9\-._~!$&'()*+,;=:@]|{_ENCODED})"
_NAME = rf"(?:[A-Za-z0-9\-._~!$&'()*+,;=]|{_ENCODED})"
_NO_COLON = rf"(?:[A-Za-z0-9\-._~!$&'()*+,;=@]|{_ENCODED})"
_AUTHORITY = rf"//(?:(?:{_NAME}|:)*@)?{_NAME}*(?::[0-9]*)?(?:/{_CHAR}*)*"
_QUERY = rf"(?:\?(?:{_CHAR}|[/?])*)?(?:#(?:{_CHAR}|[/?])*)?"
_POINTER = "(?:/(?:[^~/]|~[01])*)*"
_VARIABLE = rf"(?:[A-Za-z0-9_]|{_ENCODED})+(?:\.(?:[A-Za-z0-9_]|{_ENCODED})+)*(?::[1-9][0-9]{{0,3}}|\*)?"

OWN_FORMATS: Mapping[str, str] = {
    "date": _DATE,
    "date-time": f"{_DATE}[tT]{_TIME}",
    "time": _TIME,
    "uri-reference": (
        rf"(?:[A-Za-z][A-Za-z0-9+\-.]*:(?:{_AUTHORITY}|/(?:{_CHAR}+(?:/{_CHAR}*)*)?|{_CHAR}+(?:/{_CHAR}*)*)?"
        rf"|{_AUTHORITY}|/(?:{_CHAR}+(?:/{_CHAR}*)*)?|{_NO_COLON}+(?:/{_CHAR}*)*)?{_QUERY}"
    ),
    "uri-template": (
        rf"(?:[!#$&()*+,\-./0-9:;=?@A-Z\[\]_a-z~]|{_ENCODED}|\{{[+#./;?&]?{_VARIABLE}(?:,{_VARIABLE})*\}})*"
    ),
    "json-pointer": _POINTER,
    "relative-json-pointer": f"(?:0|[1-9][0-9]*)(?:#|{_POINTER})",
}
"""Formats that are written here, as patterns of the whole string. Each matches at most what the standard's definition
does. A `format` that no standard defines constrains nothing."""
LIBRARY_FORMATS = frozenset({"duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"})
"""Formats that llguidance knows."""
REFUSED_FORMATS = frozenset({"idn-email", "idn-hostname", "iri", "iri-reference", "regex"})
"""Formats of the standard that no grammar here can tell from other strings."""


def pattern_of(name: str) -> str:
    """The pattern of a format of `OWN_FORMATS`."""
    return f"^(?:{OWN_FORMATS[name]})$"
