"""The rules of the house, checked on the syntax trees of `src/inlay`: layers, methods' names, sizes, classes' names.

`docs/layers.toml` lists the rooms; `python tests/test_house.py` prints every violation.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import pytest

from inlay.methods.registry import all_methods

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "inlay"
LAYERS = tomllib.loads((ROOT / "docs" / "layers.toml").read_text(encoding="utf-8"))["layer"]
LONGEST, MOST_PARAMETERS = 80, 8
APART = "papers"  # may import everything; commands find it by its name in a string, and nothing imports it
DOOR = ("__init__", "__main__")  # the public names and `python -m inlay`: above all rooms
METHOD_ROOMS = ("methods", APART)  # where methods may be named
OPERATORS = "attention"  # tensors in, tensors out: torch's operators and autograd functions take no dataclass
# Names of methods that are also ordinary words: they count where a program decides by them (see `_decides`).
ORDINARY = {"adapter", "bias", "full", "ln", "norm", "prefix", "prompt"}
# (file, name): what is meant there, if not the method.
ALLOWED_NAMES = {
    ("attention/__init__.py", "ntk_attention"): "the operation, which the method uses",
    ("attention/functional.py", "ntk_attention"): "the operation, which the method uses",
    ("cli/compare.py", "full"): "a size: all of the training data",
    ("cli/options.py", "activation-prompt"): "the help text of an option",
    ("cli/options.py", "multi-lora"): "the help text of an option",
    ("serve/lora_rows.py", "adapter"): "a field of an answer",
    ("serve/prompt_web.py", "prompt"): "a field of a request",
    ("serve/prompts.py", "prompt"): "a field of an answer",
    ("workflow/answer_files.py", "adapter"): "the folder of a run",
    ("workflow/explain/models.py", "adapter"): "a field of an explanation",
    ("workflow/lora_folders.py", "adapter"): "the folder of a run",
    ("workflow/generate.py", "prompt"): "a column of a table",
    ("workflow/export.py", "lora"): "the format that is exported to",
}
# (file, function): why it is longer, or takes more, than the others may.
ALLOWED_SIZES: dict[tuple[str, str], str] = {
    ("workflow/tune.py", "tune"): "public, and its options are given by name",
    ("backbones/loading.py", "load"): "public, and its options are given by name, as those of from_pretrained are",
}


@dataclass(frozen=True)
class Module:
    """One file of the package and its syntax tree."""

    path: Path

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.path.read_text(encoding="utf-8"))

    @cached_property
    def file(self) -> str:
        return self.path.relative_to(PACKAGE).as_posix()

    @property
    def room(self) -> str:
        return self.file.split("/")[0].removesuffix(".py")

    @cached_property
    def package(self) -> list[str]:
        return ["inlay", *self.path.relative_to(PACKAGE).parts[:-1]]

    def imports(self) -> Iterator[tuple[int, str]]:
        """The line and the full name of whatever is imported of inlay: at once or later, by a statement or a string."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                above = self.package[: len(self.package) - node.level + 1] if node.level else []
                origin = ".".join([*above, *([node.module] if node.module else [])])
                names = [f"{origin}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                path = node.value.partition(":")[0]
                names = [path] if re.fullmatch(r"inlay(\.\w+)+", path) and path.split(".")[1] in rooms() else []
            else:
                continue
            yield from ((node.lineno, name) for name in names if name.split(".")[0] == "inlay")

    def strings(self) -> Iterator[tuple[ast.Constant, ast.AST]]:
        """String constants of the code and what each stands in; docstrings and annotations are left out."""
        for parent in ast.walk(self.tree):
            if isinstance(parent, ast.Expr):
                continue
            for child in ast.iter_child_nodes(parent):
                if isinstance(child, ast.Constant) and isinstance(child.value, str):
                    yield child, parent

    def functions(self) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield node


@cache
def modules() -> tuple[Module, ...]:
    return tuple(Module(path) for path in sorted(PACKAGE.rglob("*.py")))


@cache
def rooms() -> dict[str, int]:
    """Every room in the order of the layers, lowest first, and its place there."""
    names = [room["name"] for layer in LAYERS for room in layer["room"]]
    assert len(names) == len(set(names)), names
    return {name: place for place, name in enumerate(names)}


def unlisted_rooms() -> Iterator[str]:
    """Rooms that the list lacks, or that are no more."""
    found = {module.room for module in modules()} - set(DOOR)
    yield from (f"docs/layers.toml does not list {name}" for name in sorted(found - rooms().keys()))
    yield from (f"docs/layers.toml lists {name}, which does not exist" for name in sorted(rooms().keys() - found))


def wrong_imports() -> Iterator[str]:
    """Imports that go up, or sideways to a room that is listed later."""
    for module in modules():
        if module.room in (*DOOR, APART):
            continue
        for line, name in module.imports():
            room = name.split(".")[1] if "." in name else ""
            if room == "__version__" or room == module.room:
                continue
            if room == APART and module.room == "cli" and not _is_import(module, line):
                continue
            if room not in rooms():
                yield f"{module.file}:{line} imports {name}: take it from its room, not from the package's door"
            elif rooms()[room] > rooms()[module.room]:
                yield f"{module.file}:{line} ({module.room}) imports {name}, which lies above it"


def _is_import(module: Module, line: int) -> bool:
    return any(isinstance(n, ast.Import | ast.ImportFrom) and n.lineno == line for n in ast.walk(module.tree))


def method_folders() -> set[str]:
    """Those that declare methods; `mixture` is what several share."""
    found = (PACKAGE / "methods").glob("*/__init__.py")
    return {path.parent.name for path in found if re.search(r"^METHODS? = ", path.read_text("utf-8"), re.MULTILINE)}


def methods_that_import_each_other() -> Iterator[str]:
    """A method's folder reads what methods share, and no other method's folder."""
    folders = method_folders()
    for module in modules():
        own = module.package[2] if module.package[1:2] == ["methods"] and len(module.package) > 2 else None
        for line, name in module.imports():
            parts = name.split(".")
            if own is not None and parts[1:2] == ["methods"] and parts[2:3] and parts[2] in folders - {own}:
                yield f"{module.file}:{line} imports {name}: what two methods share belongs to methods/ itself"


def named_methods() -> Iterator[str]:
    """Methods that are known by name in a general room: as a string, an identifier or an import of their folder."""
    folders = method_folders()
    identifiers = {name.replace("-", "_") for name in all_methods() if "-" in name}
    for module in modules():
        if module.room in METHOD_ROOMS:
            continue
        found: set[tuple[int, str]] = set()
        for constant, parent in module.strings():
            for name in all_methods():
                exact = constant.value == name and (name not in ORDINARY or _decides(constant, parent))
                inside = "-" in name and re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", str(constant.value))
                if exact or (inside and not _is_help(parent)):
                    found.add((constant.lineno, name))
        for node in ast.walk(module.tree):
            names = [getattr(node, field, None) for field in ("id", "attr", "arg", "name", "asname")]
            found |= {(getattr(node, "lineno", 0), name) for name in names if name in identifiers}
        for line, name in module.imports():
            parts = name.split(".")
            if parts[1:2] == ["methods"] and len(parts) > 2 and parts[2] in folders:
                found.add((line, f"methods/{parts[2]}"))
        for line, name in sorted(found):
            if (module.file, name) not in ALLOWED_NAMES:
                yield f"{module.file}:{line} names {name}"


def _decides(constant: ast.Constant, parent: ast.AST) -> bool:
    """Whether the code depends on the word: compares or looks up by it, names a constant or a default with it.

    What is compared with a method's `form` is a form: "full" is one of them too.
    """
    if isinstance(parent, ast.Dict):
        return any(key is constant for key in parent.keys)
    if isinstance(parent, ast.Compare):
        return not (isinstance(parent.left, ast.Attribute) and parent.left.attr == "form")
    if isinstance(parent, ast.Call):
        return ast.unparse(parent.func).endswith("registry.get")
    return isinstance(parent, ast.arguments | ast.MatchValue | ast.Assign | ast.AnnAssign)


def _is_help(parent: ast.AST) -> bool:
    return isinstance(parent, ast.keyword) and parent.arg == "help"


def long_functions() -> Iterator[str]:
    for module in modules():
        for function in module.functions():
            length = (function.end_lineno or 0) - function.lineno + 1
            if length > LONGEST and not _is_kernel(function) and (module.file, function.name) not in ALLOWED_SIZES:
                yield f"{module.file}:{function.lineno} {function.name} has {length} lines"


def functions_with_many_parameters() -> Iterator[str]:
    """Commands are left out, whose parameters are the options, operators and kernels."""
    for module in modules():
        if module.room == OPERATORS or _is_command(module):
            continue
        for function in module.functions():
            given = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
            count = len([each for each in given if each.arg not in ("self", "cls")])
            allowed = _is_kernel(function) or (module.file, function.name) in ALLOWED_SIZES
            if count > MOST_PARAMETERS and not allowed:
                yield f"{module.file}:{function.lineno} {function.name} has {count} parameters"


def _is_command(module: Module) -> bool:
    return module.room == "cli" or module.path.stem == "command" or "commands" in module.package


def _is_kernel(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether it is compiled for a GPU, as one function."""
    return any("triton" in ast.unparse(decorator) for decorator in function.decorator_list)


def classes_of_one_name() -> Iterator[str]:
    where: dict[str, list[str]] = defaultdict(list)
    for module in modules():
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                where[node.name].append(f"{module.file}:{node.lineno}")
    yield from (f"{name} is a class in {', '.join(files)}" for name, files in sorted(where.items()) if len(files) > 1)


RULES = {
    "rooms": unlisted_rooms,
    "layers": wrong_imports,
    "methods import methods": methods_that_import_each_other,
    "names of methods": named_methods,
    "long functions": long_functions,
    "many parameters": functions_with_many_parameters,
    "classes of one name": classes_of_one_name,
}


@pytest.mark.parametrize("rule", RULES)
def test_the_house_keeps(rule: str) -> None:
    assert not list(RULES[rule]())


def test_every_exemption_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    names, sizes = dict(ALLOWED_NAMES), dict(ALLOWED_SIZES)
    monkeypatch.setattr(sys.modules[__name__], "ALLOWED_NAMES", {})
    monkeypatch.setattr(sys.modules[__name__], "ALLOWED_SIZES", {})
    found = [*named_methods(), *long_functions(), *functions_with_many_parameters()]
    unneeded = [key for key in [*names, *sizes] if not any(f.startswith(f"{key[0]}:") and key[1] in f for f in found)]
    assert unneeded == []


def test_the_way_of_one_run_is_short_and_exists() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    _, _, section = page.partition("## The way of one run")
    files = re.findall(r"`([\w/]+\.py)`", section.partition("\n## ")[0])
    assert 0 < len(set(files)) == len(files) <= 35
    assert [file for file in files if not (PACKAGE / file).is_file()] == []


if __name__ == "__main__":
    for rule, look in RULES.items():
        found = list(look())
        print(f"\n{rule}: {len(found)}", *found, sep="\n  ")
