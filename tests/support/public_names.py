"""The public names of the five packages, with signatures, read from the source: nothing is imported.

`PYTHONPATH=. python tests/support/public_names.py` from the root writes `docs/public-names.txt`. A line per name, and
per public member of a class, that of its bases in this project included. At a release the file is copied to
`docs/public-names-VERSION.txt`: what differs from the newest such copy must stand in the changelog.
"""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from repository import ROOT

PACKAGES = ("ubatch", "moe", "attention", "model_runner", "serving")
FILE = ROOT / "docs" / "public-names.txt"
COMMAND = "PYTHONPATH=. python tests/support/public_names.py"

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | ast.Assign | ast.AnnAssign


def listing() -> str:
    """The whole file."""
    return "".join(f"{line}\n" for package in PACKAGES for line in lines_of(package))


def lines_of(package: str) -> Iterator[str]:
    """The lines of one package, sorted by name."""
    for name in sorted(shown_by(package)):
        found = resolve(package, name)
        if found is None:
            raise LookupError(f"{package}.{name} is in __all__, but it is neither defined nor imported there")
        module, node = found
        yield f"{package}.{described(name, node)}"
        if isinstance(node, ast.ClassDef):
            members = members_of(module, node)
            yield from (f"{package}.{name}.{members[member]}" for member in sorted(members))


def shown_by(package: str) -> list[str]:
    """What its `__all__` lists; without one, what it imports, as `ubatch.public` does."""
    body = tree_of(package).body
    for node in body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names: list[str] = ast.literal_eval(node.value)
            return names
    return [alias.name for node in body if isinstance(node, ast.ImportFrom) for alias in node.names]


def members_of(module: str, node: ast.ClassDef) -> dict[str, str]:
    """The public members of a class by name, each described; those of its bases first, which it may override."""
    members: dict[str, str] = {}
    for base in reversed(node.bases):
        found = resolve(module, base.id) if isinstance(base, ast.Name) else None
        if found is not None and isinstance(found[1], ast.ClassDef):
            members |= members_of(found[0], found[1])
    for member in node.body:
        for name in names_of(member):
            if name == "__init__" or not name.startswith("_"):
                members[name] = described(name, member)
    return members


def names_of(node: ast.stmt) -> list[str]:
    """What a statement defines."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)]


def described(name: str, node: ast.stmt) -> str:
    """`name` as it is to be used: a signature, an annotation, a short value."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        result = "" if node.returns is None else f" -> {ast.unparse(node.returns)}"
        decorators = {ast.unparse(decorator) for decorator in node.decorator_list}
        if decorators & {"property", "cached_property", "functools.cached_property"}:
            return f"{name}{result}"
        return f"{name}({ast.unparse(node.args)}){result}"
    if isinstance(node, ast.ClassDef):
        return f"{name}({', '.join(map(ast.unparse, node.bases))})"
    if isinstance(node, ast.AnnAssign):
        default = node.value
        if isinstance(default, ast.Call) and ast.unparse(default.func) == "refused":
            default = default.args[0]  # what is behind it is why other values are refused
        value = "" if default is None else f" = {ast.unparse(default)}"
        return f"{name}: {ast.unparse(node.annotation)}{value}"
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant | ast.Name | ast.Attribute):
        return f"{name} = {ast.unparse(node.value)}"
    return name


def resolve(module: str, name: str) -> tuple[str, Definition] | None:
    """Where `name` of a module is defined, through its imports; None outside of this project."""
    for node in ast.walk(tree_of(module)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in PACKAGES:
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return resolve(node.module or "", alias.name)
    for statement in tree_of(module).body:
        if isinstance(statement, Definition) and name in names_of(statement):
            return module, statement
    return None


@cache
def tree_of(module: str) -> ast.Module:
    """The syntax of a module of this project."""
    path = ROOT / module.replace(".", "/")
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    file = path / "public.py" if module == "ubatch" else file  # from where they are imported when first asked for
    return ast.parse(file.read_text())


def last_release() -> Path:
    """The list of the newest release."""
    return max(FILE.parent.glob("public-names-*.txt"), key=version)


def version(file: Path) -> tuple[int, ...]:
    """Of a release's list."""
    return tuple(map(int, file.stem.rpartition("-")[2].split(".")))


def changed_names(before: str, now: str) -> set[str]:
    """The names, without their package, whose lines differ; of a class that came or went only its own."""
    changed = set(before.splitlines()) ^ set(now.splitlines())
    known = [{dotted(line) for line in text.splitlines()} for text in (before, now)]
    names = set()
    for line in changed:
        package, name, *member = dotted(line).split(".")
        both = all(f"{package}.{name}" in each for each in known)
        names.add(".".join([name, *member] if both else [name]))
    return names


def dotted(line: str) -> str:
    """The name that a line begins with."""
    return line.partition(" ")[0].partition("(")[0].rstrip(":")


if __name__ == "__main__":
    FILE.write_text(listing())
    print(f"{FILE.relative_to(ROOT)}: {len(listing().splitlines())} names")
