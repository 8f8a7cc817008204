"""Floor 4: what runs the engine. Commands (`cli`), launching ranks on one machine (`ranks`), benchmarks (`bench`)."""

from serving.cli import main

__all__ = ["main"]
