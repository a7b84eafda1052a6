"""A trained perturbation of what enters a module, the same for every input: activation prompts and visual prompts.

At layer 0, where `z` is the image `x`, it is visual prompting (Bahng et al. 2022); deeper it is the activation prompts'
(Visual Prompting Reimagined: The Power of Activation Prompts, section 3). A method adds templates and chooses layers.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from inlay.anatomy import Anatomy, anatomy, stated_image_size
from inlay.backbones import image_side
from inlay.errors import InlayError, unknown
from inlay.methods.capabilities import alternatives
from inlay.methods.config import InlayConfig
from inlay.methods.plain import plain_name
from inlay.methods.tuner import HookedLayer, InlayTuner, on_first_tensor

if TYPE_CHECKING:
    from inlay.tasks.schema import TaskSchema

USUAL_SIZE = 224


@dataclass
class FeaturePromptConfig(InlayConfig):
    """What every prompt on a feature map or on the pixels has: a template `g`, and the size of what it acts on."""

    goes_by_blocks: ClassVar[bool] = True

    kinds: ClassVar[tuple[str, ...]]
    method: ClassVar[str]

    kind: str = field(default="add", metadata={"help": "The template g(z, delta) by which the prompt acts."})
    image_size: int | list[int] | None = field(
        default=None,
        metadata={
            "help": "Side of the images in pixels, or height and width; None: the size that the model states, else 224."
        },
    )
    shapes: dict[str, list[int]] | None = field(
        default=None,
        metadata={"help": "Filled in: the shape of what is trained, by the module whose input it changes."},
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kind not in self.kinds:
            raise unknown("kind of prompt", self.kind, self.kinds)
        self.image_size = _sides(self.image_size)

    @classmethod
    def for_task(
        cls, settings: Mapping[str, Any], schema: TaskSchema | None, processor: Any, model: nn.Module
    ) -> tuple[dict[str, Any], TaskSchema | None, list[str]]:
        """On images of the size that the image processor gives, unless the user gave one."""
        given, schema, notes = super().for_task(settings, schema, processor, model)
        if "image_size" not in given and anatomy(model).modality == "image":
            given["image_size"] = side = image_side(processor)
            notes.append(
                f"{cls.method} is made for images of {side} x {side} pixels, as the image processor gives them"
            )
        return given, schema, notes

    @property
    def appends_tokens(self) -> bool:
        return self.kind == "concat"


@dataclass(frozen=True)
class FeaturePlace:
    """A prompt at one place: its template, the shape of what is trained or of the image that it frames.

    `exact` says that `z` must have this very shape, and is not a longer one that shares the values across positions.
    `last` is the last block, behind which added tokens are taken out again.
    """

    kind: str
    shape: tuple[int, ...]
    exact: bool = True
    width: int = 0
    last: nn.Module | None = None


class Template(nn.Module):
    """One adapter's `delta` at one place. `tokens` is how many it adds to the sequence."""

    tokens: int = 0

    def __init__(self, place: FeaturePlace, **where: Any) -> None:
        super().__init__()
        self.place_shape, self.exact = place.shape, place.exact
        self.weight = nn.Parameter(torch.zeros(self.trained_shape(place), **where))

    def trained_shape(self, place: FeaturePlace) -> Sequence[int]:
        """The shape of `delta` as it is stored."""
        return place.shape

    def check(self, z: Tensor) -> None:
        """An error where `z` is of another size than the prompt: broadcasting would otherwise do something else."""
        found = tuple(z.shape[1:])
        if self.exact and found != self.place_shape:
            raise InlayError(
                f"The prompt was made for features of {_by(self.place_shape)}, and these are {_by(found)}. Images must "
                "have the size that it was made for: give image_size= when the adapter is made, or resize the images. "
                "Where another adapter adds tokens, take that one off."
            )


class Add(Template):
    """`g(z, delta) = z + delta`, `delta = 0` at the start."""

    def forward(self, z: Tensor) -> Tensor:
        """The prompted features."""
        self.check(z)
        return z + self.weight.to(z.dtype)


class FeaturePromptLayer(HookedLayer):
    """Prompts what enters its host, block `l` of the model or its stem (`l = 0`):

        z^(l) <- g(z^(l), delta^(l)),      for example  z^(l) + delta^(l),

    with the same `delta^(l)` for every input. The method's `templates` are the `g` by name. Nothing before the host
    enters the autograd graph, since nothing there is trained.
    """

    templates: ClassVar[Mapping[str, type[Template]]]

    def update_layer(self, adapter_name: str, place: FeaturePlace) -> None:
        # Made in place: on the meta device nothing can be moved, only made.
        own = next((p for p in self.host.parameters() if p.is_floating_point()), None)
        where = {} if own is None else {"device": own.device, "dtype": own.dtype}
        self.pieces[adapter_name] = self.templates[place.kind](place, **where)

    def before(
        self, host: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """The host's forward pre-hook."""
        names = self.running()
        return on_first_tensor(lambda z: self.prompted(z, names), args, kwargs) if names else None

    def prompted(self, z: Tensor, names: list[str]) -> Tensor:
        """`g(z, delta)`, for one adapter after the other."""
        for name in names:
            z = self.pieces[name](z)
        return z


class FeaturePromptTuner(InlayTuner):
    """Finds the size of the images, and puts a prompt at the layers that the method chooses.

    Shapes are found when the adapter is made, and kept in its config: a reload needs no dry run.
    """

    name: ClassVar[str]

    def _targets(self, config: Any) -> list[str]:
        if config.target_modules is not None or config.exclude_modules is not None:
            raise InlayError(
                f"{self.name} acts at the input of blocks and chooses them by layers=, not by target_modules= or "
                "exclude_modules=. Leave these out."
            )
        parts = anatomy(self.model)
        self.settle_size(config, parts)
        config.layers = self.choose_layers(config, parts)
        shapes = self.choose_shapes(config, parts)
        config.shapes = {plain_name(_host(parts, layer).name): list(shape) for layer, shape in shapes.items()}
        return list(config.shapes)

    def settle_size(self, config: Any, parts: Anatomy) -> None:
        """The size of the images: the one given, the model's own, or the usual one, and then say so."""
        if parts.modality == "text":
            if config.image_size is not None:
                raise InlayError(
                    f"image_size={config.image_size!r}: {type(self.model).__name__} reads text. Leave image_size out."
                )
            return
        stated = config.image_size or stated_image_size(parts.backbone.module)
        if stated is None:
            stated = (USUAL_SIZE, USUAL_SIZE)
            warnings.warn(
                f"{type(self.model).__name__} does not say what size of image it takes: {self.name} is made for "
                f"{USUAL_SIZE} x {USUAL_SIZE} pixels. Give image_size= for another.",
                stacklevel=2,
            )
        config.image_size = list(stated)

    def choose_layers(self, config: Any, parts: Anatomy) -> list[int]:
        """The layers at whose input prompts act; 0 is the pixels."""
        raise NotImplementedError

    def choose_shapes(self, config: Any, parts: Anatomy) -> dict[int, tuple[int, ...]]:
        """The shape of `delta`, or of the image that it frames, at every layer."""
        raise NotImplementedError

    def settings_at(self, config: Any, name: str) -> FeaturePlace:
        """The prompt at one host, from what the config has on record."""
        return FeaturePlace(config.kind, tuple(config.shapes[name]))

    @classmethod
    def refusal(cls, model: nn.Module) -> str:
        """Where there is nothing for the method to act on."""
        return f"{cls.name} finds no place in {type(model).__name__}. {alternatives(model, cls.name)}"


def _host(parts: Anatomy, layer: int) -> Any:
    """The part whose input is the feature map of a layer: block l, or the stem, whose input is the pixels."""
    return parts.blocks[layer - 1] if layer else parts.stem


def image_channels(parts: Anatomy) -> int:
    """Of the images: what the stem's first convolution reads."""
    return next(module.in_channels for module in parts.stem.module.modules() if isinstance(module, nn.Conv2d))


def _sides(given: Any) -> list[int] | None:
    """Height and width."""
    if given is None:
        return None
    sides = list(given) if isinstance(given, (list, tuple)) else [given, given]
    if len(sides) != 2 or not all(type(side) is int and side > 0 for side in sides):
        raise InlayError(f"image_size={given!r}: give the side in pixels, such as 224, or [height, width].")
    return sides


def _by(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))
