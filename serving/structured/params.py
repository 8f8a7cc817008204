"""What a user asks for: the form of an output. Fields and meanings are vLLM's."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from model_runner import RequestError

KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


@dataclass(frozen=True)
class StructuredOutputsParams:
    """The form of an output. Give exactly one of the first six.

    Attributes:
        json: a JSON schema, as a mapping or as text.
        regex: a regular expression that the whole output matches.
        choice: the output is one of these texts.
        grammar: a context-free grammar, in Lark's or GBNF's notation.
        json_object: any JSON object.
        structural_tag: text with tagged parts, each with a form of its own, as vLLM takes it.
        whitespace_pattern: regular expression of the white space between JSON's tokens.
        disable_any_whitespace: JSON without white space.
        disable_additional_properties: objects have the properties of the schema only.

    Raises:
        RequestError: at construction, if none or several of the first six are given.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | Mapping[str, Any] | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False

    def __post_init__(self) -> None:
        given = self._given()
        if len(given) != 1:
            what = f"has {' and '.join(given)}" if given else "has none"
            message = f"structured_outputs needs exactly one of {', '.join(KINDS)}; it {what}."
            raise RequestError(message, param="structured_outputs")

    @property
    def kind(self) -> str:
        """Which of the first six is given."""
        return self._given()[0]

    def _given(self) -> list[str]:
        return [name for name in KINDS if getattr(self, name) is not None and getattr(self, name) is not False]
