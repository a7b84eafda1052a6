"""The one place that extends PEFT and Transformers: PEFT's closed list of method types, its mappings, the card of a
saved adapter, and the adapters that Transformers loads itself.

PEFT looks methods up in the enum `PeftType` and in mappings keyed by it. `register()` adds a member and the entries for
every method of the registry that has a tuner of its own; it may be called any number of times. `when_imported` arranges
for that without importing PEFT, which takes seconds.
"""

from __future__ import annotations

import gc
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from inspect import getattr_static, signature
from pathlib import Path
from types import ModuleType
from typing import Any

from inlay.methods.registry import Method, all_methods

PREFIX = "INLAY_"
CARD_HEADING = "## How to load this adapter"
CARD_SECTION = """The method is one of inlay's (`pip install inlay`). Import it before PEFT reads the adapter:

```python
import inlay  # registers the method with PEFT
from peft import PeftModel

model = PeftModel.from_pretrained(base_model, "this/folder")
```
"""
POOLING_HEADING = "## What the head reads"
POOLING_SECTION = """The head was trained on the feature that inlay calls pooling={pooling!r}, not on the one that
Transformers' class reads. Load the base model with it (`pip install inlay`):

```python
import inlay

base_model = inlay.load_backbone("the/base-model", num_labels=..., pooling={pooling!r}).model
```
"""


def register() -> None:
    """Make PEFT know every registered method of ours. Costs nothing when it does already."""
    from peft.utils.peft_types import PeftType

    known = set(PeftType.__members__)
    # One type, one config and tuner; several methods may be settings of the same.
    waiting = {m.peft_type: m for m in all_methods().values() if m.tuner is not None and m.peft_type not in known}
    if waiting:
        with _without_half_imported(waiting.values()):
            for method in waiting.values():
                _register(method)
    _extend_peft()


def _register(method: Method) -> None:
    from peft.utils.peft_types import register_peft_method

    if method.peft_type is None or not method.peft_type.startswith(PREFIX):
        raise ValueError(
            f"Method {method.name!r} has peft_type={method.peft_type!r}; ours start with {PREFIX!r}, since PEFT keeps "
            "adding types of its own."
        )
    config, tuner = method.config_class(), method.tuner_class()
    _add_member(method.peft_type)
    register_peft_method(
        name=method.peft_type.lower(), config_cls=config, model_cls=tuner, prefix=method.parameter_prefix
    )


def _add_member(name: str) -> None:
    """Add a member to `PeftType`. Members are looked up by name, by value and as attributes: all three must know it."""
    from peft.utils.peft_types import PeftType

    member = str.__new__(PeftType, name)
    member._name_ = name
    member._value_ = name
    member._sort_order_ = len(PeftType)
    member.__objclass__ = PeftType
    type.__setattr__(PeftType, name, member)
    PeftType._member_names_.append(name)
    PeftType._member_map_[name] = member
    PeftType._value2member_map_[name] = member


@contextmanager
def _without_half_imported(methods: Iterable[Method]) -> Iterator[None]:
    """Import our modules, and those of methods from other packages, anew where one of them, not yet whole, is what
    brought PEFT in.

    The one under way would be handed out half empty. The import system gives its importer whatever stands in
    `sys.modules` at the end, so the whole module takes its place.
    """
    paths = [path.partition(":")[0] for method in methods for path in (method.config, method.tuner) if path]
    folders = ("inlay.methods.", *(f"{path.rpartition('.')[0]}." for path in paths if "." in path))
    ours = [(name, module) for name, module in sys.modules.items() if name.startswith(folders) or name in paths]
    half = {name: module for name, module in ours if getattr(module.__spec__, "_initializing", False)}
    for name in half:
        del sys.modules[name]
    yield
    for name, module in half.items():
        sys.modules.setdefault(name, module)


def wrap_once(owner: Any, name: str, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Put `around(original)` in the place of a method of another library's class; a second time does nothing."""
    found = getattr_static(owner, name)
    original = found.__func__ if isinstance(found, classmethod) else found
    if getattr(original, "_inlay", False):
        return
    changed: Any = wraps(original)(around(original))
    changed._inlay = True
    setattr(owner, name, classmethod(changed) if isinstance(found, classmethod) else changed)


def _extend_model_card(original: Callable[..., None]) -> Callable[..., None]:
    """Let the card that PEFT writes say that `inlay` must be imported: without it a loader meets a bare KeyError. And
    what the head reads, where Transformers would have it read something else."""

    def create_or_update_model_card(self: Any, output_dir: str) -> None:
        from inlay.backbones.pooled import installed

        original(self, output_dir)
        wanted = {}
        if (pooling := installed(self)) is not None:
            wanted[POOLING_HEADING] = POOLING_SECTION.format(pooling=pooling)
        if any(config.peft_type.value.startswith(PREFIX) for config in self.peft_config.values()):
            wanted[CARD_HEADING] = CARD_SECTION
        from inlay.methods.folder import CARD  # not before: `import inlay` imports next to nothing

        card = Path(output_dir) / CARD
        for heading, section in wanted.items():
            text = card.read_text(encoding="utf-8")
            if heading not in text:
                card.write_text(f"{text.rstrip()}\n\n{heading}\n\n{section}", encoding="utf-8")

    return create_or_update_model_card


def _extend_peft() -> None:
    """Let PEFT's doors heed what an adapter's note says of what the head reads and of its outputs, and write it where
    PEFT saves one. And let models that mix LoRAs take in those with other heads."""
    from peft import PeftModel
    from peft.auto import _BaseAutoPeftModel

    from inlay.methods.mixture.taking_in import taking_in
    from inlay.methods.pooling_notes import agreeing_with_note, write_notes

    def loading(original: Callable[..., Any]) -> Callable[..., Any]:
        def load_adapter(self: Any, model_id: Any, adapter_name: str, *args: Any, **kwargs: Any) -> Any:
            with agreeing_with_note(self, model_id, kwargs), taking_in(self, model_id, adapter_name, kwargs):
                return original(self, model_id, adapter_name, *args, **kwargs)

        return load_adapter

    def making(original: Callable[..., Any]) -> Callable[..., Any]:
        def from_pretrained(cls: Any, model: Any, model_id: Any, *args: Any, **kwargs: Any) -> Any:
            with agreeing_with_note(model, model_id, kwargs):  # before the adapter is in the model
                return original(cls, model, model_id, *args, **kwargs)

        return from_pretrained

    def saving(original: Callable[..., Any]) -> Callable[..., Any]:
        def save_pretrained(self: Any, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
            given = signature(original).bind(self, save_directory, *args, **kwargs).arguments
            result = original(self, save_directory, *args, **kwargs)
            if given.get("is_main_process", True):
                write_notes(self, Path(save_directory), given.get("selected_adapters") or list(self.peft_config))
            return result

        return save_pretrained

    def choosing(original: Callable[..., Any]) -> Callable[..., Any]:
        def from_pretrained(cls: Any, source: Any, *args: Any, **kwargs: Any) -> Any:
            from inlay.methods.noted_heads import with_noted_head

            return original(cls, source, *args, **with_noted_head(source, kwargs))

        return from_pretrained

    wrap_once(_BaseAutoPeftModel, "from_pretrained", choosing)
    wrap_once(PeftModel, "create_or_update_model_card", _extend_model_card)
    wrap_once(PeftModel, "load_adapter", loading)
    wrap_once(PeftModel, "from_pretrained", making)
    wrap_once(PeftModel, "save_pretrained", saving)


def extend_transformers() -> None:
    """Let Transformers' own adapter interface load our methods; where it is imported before PEFT, that is too late."""
    from transformers.integrations.peft import PeftAdapterMixin

    from inlay.methods.transformers_adapters import extend

    extend(PeftAdapterMixin)


def when_imported(name: str, action: Callable[[], None]) -> None:
    """Run `action` now if the module of this name is imported, otherwise as soon as it has been."""
    if name in sys.modules and not getattr(sys.modules[name].__spec__, "_initializing", False):
        action()
    else:
        sys.meta_path.insert(0, _After(name, action))


class _After(importlib.abc.MetaPathFinder):
    """A finder that stands aside for every module but one, whose loader it makes run one more step, once.

    It goes when that module has been imported, and not when it is looked for: Transformers only asks whether PEFT is
    there long before it imports it.
    """

    def __init__(self, name: str, action: Callable[[], None]) -> None:
        self.name, self.action = name, action

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.name:
            return None
        others = (finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec"))
        spec = next((spec for finder in others if (spec := finder.find_spec(fullname, path, target))), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._conclude)
        return spec

    def _conclude(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
            self.action()


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: Any, action: Callable[[], None]) -> None:
        self.loader, self.action = loader, action

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # A package and its tools find their own loader on the module: give it back before they look.
        assert module.__spec__ is not None
        module.__loader__ = module.__spec__.loader = self.loader
        collects = gc.isenabled()
        gc.disable()  # PEFT brings Torch and Transformers: a million objects that stay, and no garbage among them
        try:
            self.loader.exec_module(module)
        finally:
            if collects:
                gc.enable()
        self.action()
