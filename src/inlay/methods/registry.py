"""What methods there are, and what is known of each before anything heavy is imported.

A method is a folder under `inlay/methods/` whose `__init__.py` declares `METHOD` (or `METHODS`, where one module serves
several names) and imports neither torch nor PEFT. The registry finds the folders; the test matrix, `inlay methods`,
`compare` and the documentation read the registry. Packages of other people add theirs through the entry-point group
`inlay.methods`, each entry naming a module that declares `METHOD` or `METHODS`.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from importlib.metadata import entry_points
from types import MappingProxyType, ModuleType
from typing import Any, Literal

from inlay.errors import InlayError, unknown

Form = Literal["peft", "head", "full"]
ENTRY_POINT_GROUP = "inlay.methods"


@dataclass(frozen=True)
class Method:
    """One way to adapt a frozen model. Plain data: `inlay methods` prints it without importing torch.

    `form` says how what it trained is saved: `peft`, an adapter in PEFT's format; `head`, the new head alone; `full`,
    a whole checkpoint. `config` and `tuner` are import paths, `module:Class`; a method that PEFT itself has leaves
    `tuner` and `peft_type` empty. `settings` are the config's arguments where they differ from the config's own
    defaults; `defaults` is the import path of a function that gives those that depend on the model: what to target.
    `learning_rate` is the default; `rates` has others for the kinds of model (`inlay.anatomy.Kind`) that want them.
    """

    name: str
    summary: str
    paper: str
    form: Form = "peft"
    config: str | None = None
    tuner: str | None = None
    peft_type: str | None = None
    parameter_prefix: str | None = None
    settings: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    defaults: str | None = None
    learning_rate: float = 1e-3
    rates: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    grid: tuple[float, ...] = (3e-4, 1e-3, 3e-3)
    identity_at_start: bool = True
    mergeable: bool = False

    def config_class(self) -> type:
        """The PEFT config class, imported now."""
        if self.config is None:
            raise InlayError(f"Method {self.name!r} has no config: it is saved as {self.form!r}.")
        return load(self.config)

    def takes(self, setting: str) -> bool:
        """Whether the method's config has a setting of this name; imports it.

        PEFT's own methods have no `layers`: where inlay chooses their target modules, it narrows them by it.
        """
        if self.config is None or (setting == "layers" and not getattr(self.config_class(), "chooses_layers", True)):
            return False
        names = {entry.name for entry in fields(self.config_class()) if entry.init}
        return setting in names or (setting == "layers" and self.defaults is not None and "target_modules" in names)

    def learning_rate_for(self, kind: str | None) -> float:
        """The default learning rate on a kind of model; None: of a kind that is not known."""
        return self.rates.get(kind or "", self.learning_rate)

    def tuner_class(self) -> type:
        """The tuner class, imported now."""
        if self.tuner is None:
            raise InlayError(f"Method {self.name!r} has no tuner of inlay's own.")
        return load(self.tuner)


def load(path: str) -> Any:
    """The object behind an import path `module:name`."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


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


def get(name: str) -> Method:
    """The method called `name`, or a clear error with the nearest names."""
    methods = all_methods()
    if name not in methods:
        raise unknown("method", name, methods, "`inlay methods` describes them.")
    return methods[name]
