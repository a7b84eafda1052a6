"""What the configs of inlay's own methods have in common.

A method's `config.py` subclasses `InlayConfig`, names its `PeftType` and adds fields of its own. The rest is PEFT's:
the config is saved as `adapter_config.json` and found again by its type.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, fields
from types import NoneType, UnionType
from typing import Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints, is_typeddict

from peft.config import PeftConfig

from inlay.errors import InlayError
from inlay.methods.protocol import ConfigHooks
from inlay.methods.register import register


@dataclass
class InlayConfig(ConfigHooks, PeftConfig):
    """Which modules a method adapts, and which new ones are trained and saved with it.

    `layers` counts the model's blocks from 1, as `inlay.anatomy` does, and narrows what the other options select.
    `modules_to_save` always comes to include what loading the base model initialised anew (a head, a pooler), which is
    found in the model unless `newly_initialised` names it. All names are looked up once, when the adapter is made
    (`resolved`): a reloaded adapter goes where it was, whatever the model it is put into was loaded from.

    The model keeps the object that it is given, as PEFT does, and fills it in. The same object given to another model
    serves that one too, as it was given: see `belong_to`.
    """

    _filled_in: ClassVar[dict[str, tuple[Any, Any]]] = {}  # by field: what was given, and what was made of it

    target_modules: list[str] | str | None = field(
        default=None,
        metadata={
            "help": "Names, endings of names or a regular expression of modules to adapt; None: all that fit; "
            "all-linear: the linear layers among them."
        },
    )
    exclude_modules: list[str] | str | None = field(
        default=None,
        metadata={"help": "Names, endings of names or a regular expression of modules to leave as they are."},
    )
    layers: list[int] | None = field(
        default=None,
        metadata={"help": "Blocks to adapt, counted from 1; None: all, and what lies outside the blocks too."},
    )
    modules_to_save: list[str] | None = field(
        default=None,
        metadata={"help": "Modules to train whole and to save beside the adapter; new heads are added to it."},
    )
    newly_initialised: list[str] | None = field(
        default=None,
        metadata={"help": "The modules that had no weights in the base model's checkpoint; None: found in the model."},
    )
    pooling: str | None = field(
        default=None,
        metadata={
            "help": "Filled in: what the head reads where that is not what its architecture has it read: mean, first "
            "or last."
        },
    )
    resolved: bool = field(
        default=False, metadata={"help": "Filled in: whether the names above were looked up in a model."}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        register()
        # From the command line every value arrives as a word or a number: "no" must not pass for a yes.
        hints = get_type_hints(type(self))
        for entry in fields(self):
            value = getattr(self, entry.name)
            if entry.name not in _PEFTS and not is_a(value, hints[entry.name]):
                raise InlayError(f"{entry.name}={value!r} will not do: give {in_words(hints[entry.name])}.")

    def belong_to(self, tuner: Any, adapter_name: str) -> None:
        """Become the config of one adapter. What another one has filled in is taken back, less what was edited since;
        that adapter keeps a copy of what it had."""
        before = self.__dict__.get("_owner", _nobody)()
        for name, config in [] if before is None else [*before.peft_config.items()]:
            if config is self and not (before.peft_config is tuner.peft_config and name == adapter_name):
                before.peft_config[name] = deepcopy(self)
        for name, (given, made) in self.__dict__.pop("_filled_in", {}).items():
            if getattr(self, name) == made:
                setattr(self, name, given)
        self.__dict__["_owner"] = weakref.ref(tuner)

    def __getstate__(self) -> dict[str, Any]:
        """A copy is nobody's."""
        return {name: value for name, value in self.__dict__.items() if name != "_owner"}

    @contextmanager
    def filling_in(self) -> Iterator[None]:
        """Remember what is filled in here; where it fails, undo it."""
        given = {entry.name: deepcopy(getattr(self, entry.name)) for entry in fields(self)}
        try:
            yield
        except BaseException:
            for name, value in given.items():
                setattr(self, name, value)
            raise
        made = {name: deepcopy(getattr(self, name)) for name in given}
        self.__dict__["_filled_in"] = {
            name: (value, made[name]) for name, value in given.items() if made[name] != value
        }

    def to_dict(self) -> dict[str, Any]:
        """The config as JSON-ready data, with the names of modules in a fixed order."""
        data = super().to_dict()
        if isinstance(data["target_modules"], (set, tuple, list)):
            data["target_modules"] = sorted(data["target_modules"])
        return data


_PEFTS = {entry.name for entry in fields(PeftConfig)}
_WORDS: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a word",
    list: "a list",
    dict: "a mapping",
}
_PLURALS: dict[Any, str] = {int: "numbers", float: "numbers", str: "words"}


def _nobody() -> None:
    """The owner of a config that no model has."""


def is_a(value: Any, hint: Any) -> bool:
    """Whether a value is of an annotated type, and so are the items of a list and the values of a mapping."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(is_a(value, option) for option in inner)
    if origin is Literal:
        return value in inner or (isinstance(value, str) and any(_is_spelt(value, word) for word in inner))
    kind = origin or hint
    if kind is Any or is_typeddict(kind):
        return True
    if kind in (list, tuple):
        items = inner[:1] if kind is list else ()
        return isinstance(value, (list, tuple, set)) and all(is_a(each, item) for each in value for item in items)
    if kind is dict:
        return isinstance(value, dict) and all(is_a(each, item) for each in value.values() for item in inner[1:])
    if kind in (int, float):
        return not isinstance(value, bool) and isinstance(value, (int, kind))
    return not isinstance(kind, type) or isinstance(value, kind)


def _is_spelt(value: str, word: Any) -> bool:
    """Whether a word is one that PEFT writes with a place for a number, such as `pissa_niter_[number of iters]`."""
    before, bracket, rest = str(word).partition("[")
    number = value.removeprefix(before).removesuffix(rest.partition("]")[2])
    return bool(bracket) and value.startswith(before) and number.isdecimal()


def in_words(hint: Any) -> str:
    """An annotated type for people."""
    options = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    return " or ".join(dict.fromkeys(_word(option) for option in options if option is not NoneType))


def _word(option: Any) -> str:
    kind = get_origin(option) or option
    if kind is Literal:
        return " or ".join(map(repr, get_args(option)))
    if kind is list and get_args(option):
        return f"a list of {_PLURALS.get(get_args(option)[0], 'values')}"
    return _WORDS.get(kind, getattr(kind, "__name__", str(kind)))
