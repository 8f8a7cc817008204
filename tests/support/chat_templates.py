"""Chat templates in the forms that published models have; `chat_templates.yaml` has them by kind."""

from pathlib import Path

import yaml

_KINDS: dict[str, dict[str, str]] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
TOOLS, NO_SYSTEM = _KINDS["tools"], _KINDS["no_system"]
TEMPLATES = {**TOOLS, **NO_SYSTEM, **_KINDS["others"]}
"""Name -> template, of all kinds."""
