"""Where the repository's own files lie."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
SUPPORT = TESTS / "support"
"""What tests share; programs that they start find it by `PYTHONPATH`."""
MODELS = ROOT / "examples" / "models"
TINY_MOE = MODELS / "tiny-moe"
TINY_CHAT = MODELS / "tiny-chat"
