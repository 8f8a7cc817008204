"""Values of JSON Schema's `format`: what a string must look like, as regular expressions of the whole string.

Each matches at most what the standard's definition does. A `format` that no standard defines constrains nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

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

OWN: Mapping[str, str] = {
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
"""Formats that are written here."""
LIBRARY = frozenset({"duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"})
"""Formats that llguidance knows."""
REFUSED = frozenset({"idn-email", "idn-hostname", "iri", "iri-reference", "regex"})
"""Formats of the standard that no grammar here can tell from other strings."""
