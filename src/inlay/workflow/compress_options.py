"""What a prompt can become, and how: the settings of `inlay compress`, checked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from inlay.errors import InlayError, unknown
from inlay.methods import registry
from inlay.methods.protocol import Method
from inlay.records.spec import PRECISIONS
from inlay.workflow import study

LEAST = {
    "steps": ("--steps", 0),
    "batch_size": ("--batch-size", 1),
    "texts": ("--count", 2),
    "length": ("--length", 2),
    "chunk": ("--chunk", 16),
}
LEAST_PART = 2
"""A prompt that is compressed becomes at most half as long, unless a size is given."""
USUAL_SIZE = 128
USUAL_CHUNK = 2048
SIZES = (8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""That `quality` chooses from."""


@dataclass(frozen=True)
class Target:
    """What a prompt becomes: the method that is trained and its settings for that, and, where it is written in another
    form than the method's own, the import path of a function of the trained model and the folder."""

    name: str
    method: Method
    settings: Mapping[str, Any]
    write: str | None = None


@cache
def targets() -> dict[str, Target]:
    """By name, the default first."""
    found = {}
    for name in registry.names_where(lambda method: method.compresses_prompts):
        method = registry.get(name)
        found[name] = Target(name, method, {})
        for form, (settings, write) in method.prompt_forms.items():
            found[form] = Target(form, method, settings, write)
    return found


@dataclass(frozen=True)
class Options:
    """How a prompt is compressed; docs/compress.md says what the defaults reach.

    `to` is what it becomes (`targets`; None: the first). Its size, where it has one, is given in tokens (`size`), as a
    `share` of the prompt, or found: the smallest that keeps `quality`, a share of the prompt's benefit, on texts set
    apart for that. A prompt is read in pieces of at most `chunk` tokens where it does not fit the context, or where
    that is given. `texts` are drawn from the prompted model as `study` says (study.py), `length` tokens each, unless
    the user's own are given. With 0 `steps` the least-squares fit is the result. A step changes a head by the learning
    rate, relative to its size; None: the method's own. Without `distil` the closed form is the result. `settings` are
    those of the method's config.
    """

    to: str | None = None
    size: int | None = None
    share: float | None = None
    quality: float | None = None
    chunk: int | None = None
    study: str = study.AUTO
    steps: int = 150
    learning_rate: float | None = None
    batch_size: int = 8
    texts: int = 320
    length: int = 64
    seed: int = 0
    precision: str = "auto"
    distil: bool = True
    settings: Mapping[str, Any] = field(default_factory=dict)
    revision: str | None = None
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        for name, (option, least) in LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                usual = getattr(Options, name) or USUAL_CHUNK
                raise InlayError(f"{name}={value} ({option}) must be at least {least}; {usual} is usual.")
        if self.precision not in PRECISIONS:
            raise unknown("precision", self.precision, PRECISIONS)
        if self.to is not None and self.to not in targets():
            raise unknown("target (--to)", self.to, targets())
        rate = self.learning_rate
        if rate is not None and not (math.isfinite(rate) and rate > 0):
            usual = self.target.method.hooks.distillation_rate
            raise InlayError(f"learning_rate={rate:g} must be greater than 0; {usual:g} is usual.")
        if self.study not in study.KINDS:
            raise unknown("study", self.study, study.KINDS, "Or give texts of your own (--texts).")
        self._check_size()

    def _check_size(self) -> None:
        given = [name for name in ("size", "share", "quality") if getattr(self, name) is not None]
        if len(given) > 1:
            raise InlayError(f"{' and '.join(given)} both decide how large it becomes. Give one of them.")
        if self.size is not None and self.size < 1:
            raise InlayError(f"size={self.size} (--size) must be at least 1; 128 is usual.")
        for name in ("share", "quality"):
            value = getattr(self, name)
            if value is not None and not 0 < value < 1:
                raise InlayError(f"{name}={value:g} (--{name}) must lie between 0 and 1, as in 0.05 or 0.95.")
        if given and not self.target.method.takes("size"):
            sized = [name for name, target in targets().items() if target.method.takes("size")]
            raise InlayError(
                f"{given[0]} (--{given[0]}): what {self.target.name!r} becomes has no size in tokens. Leave it out, or "
                f"give --to {' or '.join(sized)}."
            )

    @property
    def target(self) -> Target:
        """What it becomes."""
        found = targets()
        return found[self.to] if self.to is not None else next(iter(found.values()))

    @property
    def rate(self) -> float:
        """The learning rate of the distillation."""
        return self.learning_rate or self.target.method.hooks.distillation_rate

    def for_model(self, model: Any, tokens: int) -> dict[str, Any]:
        """The settings of the method's config for a prompt of so many tokens."""
        method = self.target.method
        for name, value in self.target.settings.items():
            if self.settings.get(name, value) != value:
                raise InlayError(
                    f"{name}={self.settings[name]!r}: what --to {self.target.name} writes has {name}={value!r}. Leave "
                    f"it out, or give --to {method.name}."
                )
        found = method.hooks.for_prompt(self.settings, model) | dict(self.target.settings)
        if method.takes("seed"):
            found["seed"] = self.seed
        if not method.takes("size"):
            return found
        if "size" in self.settings and (self.size or self.share or self.quality):
            raise InlayError(f"The size is given twice, once as a setting ({self.settings['size']}). Give it once.")
        wanted = self.size or self.settings.get("size")
        if wanted is not None and wanted > tokens:
            raise InlayError(f"size={wanted} (--size) is more than the prompt has, {tokens:,} tokens. Give less.")
        if wanted is None:
            wanted = min(USUAL_SIZE, tokens // LEAST_PART) if self.share is None else round(self.share * tokens)
        found["size"] = max(1, wanted)
        return found
