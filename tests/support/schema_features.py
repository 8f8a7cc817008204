"""JSON schemas by feature."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml


def _object(properties: Mapping[str, Any], required: list[str]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


_FIELDS = [f"field_{number}" for number in range(30)]
FEATURES: Mapping[str, Any] = {
    **yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")),
    "enum large": {"enum": [f"item-{number:04}" for number in range(1000)]},
    "enum large of numbers": {"enum": [number * 37 for number in range(500)]},
    "object many": _object({name: {"type": "integer", "minimum": 0, "maximum": 9} for name in _FIELDS}, _FIELDS),
    "object many optional": _object({f"p{number}": {"type": "boolean"} for number in range(20)}, []),
}
