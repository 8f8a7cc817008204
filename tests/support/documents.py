"""The documents as data: their sections, blocks and commands."""

import ast
import builtins
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from repository import ROOT

DOCUMENTS = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))
SHELL = ("bash", "console")


@dataclass(frozen=True)
class Command:
    """One command of a shell block.

    Attributes:
        text: on one line.
        shown: the lines that the document shows below it, of a `console` block.
    """

    text: str
    shown: tuple[str, ...] = ()


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        language: behind the fence; empty where there is none.
        text: without the fences.
        line: of the first fence, from 1.
    """

    language: str
    text: str
    line: int

    @property
    def file(self) -> str | None:
        """The file that it is, if its first line is a comment that says so: `# overlap.py`, `# dbo.yaml`."""
        match = re.match(r"# ([\w-]+\.(?:py|yaml))(?: .*)?\n", self.text)
        return None if match is None else match[1]

    def commands(self) -> list[Command]:
        """Those of a shell block, in order."""
        if self.language not in SHELL:
            return []
        lines = self.text.replace("\\\n", " ").splitlines()
        if self.language == "bash":
            bare = (re.sub(r"(^|\s)#.*", "", line).strip() for line in lines)
            return [Command(_one_line(line)) for line in bare if line]
        commands: list[Command] = []
        for line in lines:
            if line.startswith("$ "):
                commands.append(Command(_one_line(re.sub(r"\s+#.*", "", line[2:]))))
            elif line.strip():
                commands[-1] = Command(commands[-1].text, (*commands[-1].shown, line))
        return commands


@dataclass(frozen=True)
class Section:
    """What lies between two headings."""

    document: Path
    heading: str
    blocks: Sequence[Block]

    @property
    def name(self) -> str:
        """For the names of tests."""
        return f"{self.document.name}: {self.heading}"

    @property
    def commands(self) -> list[Command]:
        """Of all its blocks."""
        return [command for block in self.blocks for command in block.commands()]


def sections() -> Iterator[Section]:
    """Every section with a block, in order."""
    for document in DOCUMENTS:
        heading, blocks = "", list[Block]()
        lines = iter(enumerate(document.read_text(encoding="utf-8").splitlines(), 1))
        for number, line in lines:
            if line.startswith("```"):
                inside = []
                for _, inner in lines:
                    if inner.startswith("```"):
                        break
                    inside.append(inner + "\n")
                blocks.append(Block(line[3:].strip(), "".join(inside), number))
            elif line.startswith("#"):
                if blocks:
                    yield Section(document, heading, blocks)
                heading, blocks = line.lstrip("# "), []
        if blocks:
            yield Section(document, heading, blocks)


def unbound_names(code: str) -> set[str]:
    """Names that a piece of Python reads and nobody has bound: it is a fragment, not a program."""
    tree = ast.parse(code)
    bound = set(dir(builtins)) | {"__file__"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            bound.add(node.id)
        elif isinstance(node, ast.alias):
            bound.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} - bound


def _one_line(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()
