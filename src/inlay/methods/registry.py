"""What methods there are. What is known of each before anything heavy is imported is in `protocol.Method`.

A method is a folder under `inlay/methods/` whose `__init__.py` declares `METHOD` (or `METHODS`, where one module serves
several names) and imports neither torch nor PEFT. The registry finds the folders; the test matrix, `inlay methods`,
`compare` and the documentation read the registry. Packages of other people add theirs through the entry-point group
`inlay.methods`, each entry naming a module that declares `METHOD` or `METHODS`.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from importlib.metadata import entry_points
from types import MappingProxyType, ModuleType

from inlay.errors import InlayError, unknown
from inlay.methods.protocol import Form, Method, Size, Writing, load

__all__ = [
    "ENTRY_POINT_GROUP",
    "Form",
    "Method",
    "Size",
    "Writing",
    "all_methods",
    "declared",
    "get",
    "load",
    "names_where",
    "of_form",
]
ENTRY_POINT_GROUP = "inlay.methods"


def declared(module: ModuleType) -> Iterable[Method]:
    """The methods a module declares."""
    if hasattr(module, "METHOD"):
        yield module.METHOD
    yield from getattr(module, "METHODS", ())


@cache
def all_methods() -> Mapping[str, Method]:
    """Every registered method by name, in the order in which they are listed to people."""
    import inlay.methods as room

    modules = [
        importlib.import_module(f"inlay.methods.{info.name}")
        for info in pkgutil.iter_modules(room.__path__)
        if info.ispkg
    ]
    modules += [importlib.import_module(entry.value) for entry in entry_points(group=ENTRY_POINT_GROUP)]
    found: dict[str, Method] = {}
    for module in modules:
        for method in declared(module):
            if method.name in found:
                raise InlayError(f"Two methods are called {method.name!r}; rename the one in {module.__name__}.")
            found[method.name] = method
    order = {"head": 0, "peft": 1, "full": 2}
    return MappingProxyType(
        dict(sorted(found.items(), key=lambda item: (order[item[1].form], item[1].peft_type is None, item[0])))
    )


def get(name: str | Method) -> Method:
    """The method called `name`, or a clear error with the nearest names; a method itself is given back."""
    if isinstance(name, Method):
        return name
    methods = all_methods()
    if name not in methods:
        raise unknown("method", name, methods, "`inlay methods` describes them.")
    return methods[name]


def names_where(fact: Callable[[Method], object]) -> tuple[str, ...]:
    """The names of the methods for which a fact holds, as in `names_where(lambda method: method.mixes_tasks)`."""
    return tuple(name for name, method in all_methods().items() if fact(method))


def of_form(form: Form) -> tuple[str, ...]:
    """The names of the methods whose result is saved in this form."""
    return names_where(lambda method: method.form == form)
