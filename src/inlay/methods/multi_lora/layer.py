"""Multi-LoRA of one linear layer, GPT-2's transposed kind of it, embedding or convolution."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from peft.tuners.tuners_utils import check_adapters_to_merge
from torch import Tensor, nn
from torch.nn.functional import conv2d, dropout, embedding, linear
from transformers.pytorch_utils import Conv1D

from inlay.attention.call import without_autocast
from inlay.errors import InlayError
from inlay.methods import low_rank
from inlay.methods.channels import NEVER_CALLED, beside, widths
from inlay.methods.mixture.bank import TaskWeights, weight_of
from inlay.methods.mixture.products import Factors, Parts, add_products
from inlay.methods.mixture.rows import Routing, TaskRows
from inlay.methods.mixture.switch import Switch
from inlay.methods.multi_lora.shared import digest_of, draw
from inlay.methods.tuner import HookedLayer

KINDS = {"embedding": nn.Embedding, "conv2d": nn.Conv2d, "conv1d": Conv1D, "linear": nn.Linear}


@dataclass(frozen=True)
class LayerSettings:
    """What one task asks of one layer. `thirds` are those of the output's three equal parts that are adapted; None:
    all of the output."""

    routing: Routing
    name: str
    rank: int
    alpha: float
    dropout: float
    seed: int
    init: str
    thirds: tuple[int, ...] | None
    trains: bool

    def shared(self) -> dict[str, Any]:
        """What decides the layer's `A`, and must be the same for every task."""
        return {"rank": self.rank, "seed": self.seed, "init": self.init, "parts of a fused projection": self.thirds}


def fits(module: nn.Module) -> bool:
    """Whether a module can be adapted. A convolution in groups or with padding of another kind cannot."""
    if isinstance(module, nn.Conv2d):
        return module.groups == 1 and module.padding_mode == "zeros" and isinstance(module.padding, tuple)
    return isinstance(module, (nn.Linear, Conv1D, nn.Embedding)) and not isinstance(module, NEVER_CALLED)


class TaskFactor(nn.Module):
    """`B_i` of one task at one layer, (s, r, m / s) for s adapted parts of the output; zero at the start."""

    def __init__(self, shape: tuple[int, ...], settings: LayerSettings, like: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape, **beside(like)), requires_grad=settings.trains)
        self.scale = settings.alpha / settings.rank
        self.dropout = settings.dropout


class MultiLoraLayer(Switch, HookedLayer):
    """Adds to its host's output the low-rank product of each row's task:

        y = f(x; W_0) + (alpha_i / r) x A B_i,      A frozen and the same for every task i, B_i = 0 at the start.

    `A` is (r, d) as LoRA keeps it, and follows from the seed: it is not saved. A row without a task, or of a task that
    does not adapt this layer, is left as it is.
    """

    adapter_layer_names = ("inlay_multi_lora_b",)
    merges_into = ("weight",)

    def __init__(self, host: nn.Module) -> None:
        super().__init__(host)
        self.routing = Routing()
        self.shared: dict[str, Any] = {}
        self.digest = ""
        self.width_in, self.width_out = (width or 0 for width in widths(host))
        self.first = isinstance(host, nn.Conv2d)  # channels come before pixels
        self.flat = isinstance(host, (nn.Linear, Conv1D))
        self.weights = (TaskWeights(self.inlay_multi_lora_b),)
        self.register_buffer("inlay_multi_lora_a", None, persistent=False)

    @property
    def factors(self) -> dict[str, Any]:
        """The tasks' `B`s by name."""
        return self.weights[0].factors

    def update_layer(self, adapter_name: str, config: LayerSettings) -> None:
        self.check(adapter_name, config)
        self.routing = config.routing
        self.routing.layers[config.name] = self
        if not self.shared:
            self.shared = config.shared()
            self._draw(config)
        begin, end = self.parts[0]
        shape = (len(self.parts), config.rank, end - begin)
        self.inlay_multi_lora_b[adapter_name] = TaskFactor(shape, config, self.host.weight)

    def check(self, adapter_name: str, config: LayerSettings) -> None:
        """An error where a task asks for another `A` than the tasks before it share."""
        for what, value in config.shared().items():
            if self.shared and self.shared[what] != value:
                raise InlayError(
                    f"Task {adapter_name!r} has {what} {value!r} at {config.name}, and the tasks before it share an A "
                    f"with {what} {self.shared[what]!r}. Give it the same, or put it into a model of its own."
                )

    def _draw(self, config: LayerSettings) -> None:
        width = self.width_out // 3 if config.thirds else self.width_out
        thirds = config.thirds or (0,)
        self.parts: Parts = tuple((third * width, (third + 1) * width) for third in thirds)
        self.offsets = self.parts[0][0], self.parts[-1][0] - self.parts[0][0]  # the first part's, and to the next
        rank = config.rank * len(thirds)
        host, weight = self.host, self.host.weight
        lookup = isinstance(host, nn.Embedding)
        shape: tuple[int, ...] = (self.width_in, rank) if lookup else (rank, self.width_in)
        if isinstance(host, nn.Conv2d):
            shape = (*shape, *host.kernel_size)
        if weight.is_meta:
            self.inlay_multi_lora_a = torch.empty(shape, **beside(weight))
            return
        with torch.device("cpu"):
            drawn = draw(shape, config.seed, config.name, config.init, lookup=lookup)
        self.digest = digest_of(drawn)
        self.inlay_multi_lora_a = drawn.to(**beside(weight))

    def let_go(self) -> None:
        """Forget the `A`, which no task shares any more."""
        self.shared, self.digest, self.weights[0].banks = {}, "", {}
        self.inlay_multi_lora_a = None

    def place(self) -> dict[str, Any]:
        """What is needed to draw the layer's `A` again, and to know where a `B` belongs, without the model."""
        return {
            "kind": next(kind for kind, types in KINDS.items() if isinstance(self.host, types)),
            "shape": list(self.inlay_multi_lora_a.shape),
            "parts": [list(part) for part in self.parts],
            "width": self.width_out,
        }

    # ---- what trains: every task that was added, whichever is active

    def set_adapter(self, adapter_names: str | list[str], inference_mode: bool = False) -> None:
        """Choose what acts where a batch names no tasks. Freezes nothing, unless it is for inference."""
        names = [adapter_names] if isinstance(adapter_names, str) else list(adapter_names)
        for name in names:
            if name in self.inlay_multi_lora_b:
                self.inlay_multi_lora_b[name].requires_grad_(not inference_mode)
        self._active_adapter = names

    def enable_adapters(self, enabled: bool) -> None:
        """Switch all tasks on or off. A merged task is taken out of the host first."""
        if not enabled and self.merged:
            self.unmerge()
        self.switch(enabled, self.factors.values())

    # ---- forward

    def after(self, host: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        """The host's forward hook."""
        rows = self.routing.rows
        if self._disable_adapters:
            return output
        if rows is None:
            if not torch.compiler.is_compiling():
                self.routing.refuse_lost_rows(self)
            for name in self.running():
                output = self._add(args[0], output, TaskRows([name]))
            return output
        if self.merged_adapters:
            if [*rows.tasks] == self.merged_adapters:  # the rows of what is merged, and of nothing else
                return output
            raise InlayError(
                f"{', '.join(self.merged_adapters)} is merged into the base model, where it acts on every row: unmerge "
                "it before rows of other tasks are run."
            )
        return self._add(args[0], output, rows)

    def _add(self, x: Tensor, output: Tensor, rows: TaskRows) -> Tensor:
        if rows.mixed and self.flat and not self.training and rows.unwatched(output):
            lies, a = rows.located(self.weights[0], self.routing), self._a()
            if lies is not None and low_rank.fits(output, x, a, lies[0]):
                rows.check(output)
                low_rank.add_by_slot(output, x, a, *lies, self.offsets)
                return output
        with without_autocast(output):  # precision is chosen by hand here
            trains = torch.is_grad_enabled()
            if self.training or trains:
                known = self.factors
                pieces = [known[task] for task in rows.tasks if task in known]
                trains = trains and any(weight_of(piece).requires_grad for piece in pieces)
                x = self._dropped(x, pieces) if self.training else x
            if trains and not torch.compiler.is_compiling():
                self.routing.refuse_second_trainer()
            found = self._of_rows(rows, output, trains) if rows.mixed else self._of_task(rows.tasks[0], output.dtype)
            if found is None:
                return output
            target, z = output, self._project(x, output.dtype)
            if rows.mixed or self.first:
                target, z = rows.by_row(target, self.first), rows.by_row(z, self.first)
            made = add_products(target, z, found, self.parts, first=self.first)
            return made if made is output else made.view(output.shape)

    def _of_task(self, task: str, dtype: torch.dtype) -> Factors | None:
        """The `B` of one task, for all rows; None where it does not adapt this layer."""
        piece = self.factors.get(task)
        if piece is None:
            return None
        weight = weight_of(piece).to(dtype)
        return (weight,) if len(weight) == 1 else weight.unsqueeze(1).unbind(), piece.scale

    def _of_rows(self, rows: TaskRows, output: Tensor, trains: bool) -> Factors | None:
        """Each row's `B`; None where no task of theirs adapts this layer."""
        # The rows' B's are made for many layers at once. Not where layers are recomputed, each with its own.
        if not torch.compiler.is_compiling() and not (trains and self.routing.recomputing):
            fetched = rows.fetched(self.weights[0], self.routing, output.dtype, trains)
            if fetched is not None:
                if not fetched:
                    return None
                ((own, scale),) = fetched  # all of one shape
                return (own.squeeze(1),) if own.shape[1] == 1 else own.unbind(1), scale
        pieces: list[Any] = [self.factors.get(task) for task in rows.tasks]
        present = [piece for piece in pieces if piece is not None]
        if not present:
            return None
        nothing = torch.zeros_like(present[0].weight, requires_grad=False)
        weights = [nothing if piece is None else weight_of(piece) for piece in pieces]
        stacked, scale = torch.stack(weights).to(output.dtype), present[0].scale
        if any(piece.scale != scale for piece in present):
            scales = tuple(1.0 if piece is None else piece.scale for piece in pieces)
            own = rows.kept(scales, output.device, lambda: torch.tensor(scales, dtype=torch.float64))
            stacked, scale = stacked * own.to(output.dtype).view(-1, 1, 1, 1), 1.0
        slots = rows.slots(output.device)
        assert slots is not None
        return stacked.index_select(0, slots).unbind(1), scale

    def _dropped(self, x: Tensor, pieces: list[TaskFactor]) -> Tensor:
        shares = {piece.dropout for piece in pieces}
        if not any(shares):
            return x
        if len(shares) > 1:
            raise InlayError("The tasks of one batch were given different lora_dropout: give them the same.")
        if isinstance(self.host, nn.Embedding):
            raise InlayError("lora_dropout drops numbers, and an embedding is given the ids of tokens: set it to 0.")
        return dropout(x, shares.pop())

    def _a(self) -> Tensor:
        found = self._buffers.get("inlay_multi_lora_a")
        return self.inlay_multi_lora_a if found is None else found  # someone trains it

    def _project(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """`x A`, both rounded to the output's type, as autocast rounds what enters a linear layer."""
        a, host = self._a(), self.host
        if isinstance(host, nn.Embedding):
            found, scale = embedding(x, a), self._get_embed_scale()
            return found if scale is None else found * scale.to(found.dtype)
        x, a = (each if each.dtype == dtype else each.to(dtype) for each in (x, a))
        if isinstance(host, nn.Conv2d):
            return conv2d(x, a, None, host.stride, host.padding, host.dilation)
        return linear(x, a)  # keeps `A` alone for the backward pass, as the host does its weight

    # ---- merging

    def delta(self, name: str) -> Tensor:
        """`(alpha_i / r) A B_i` in the layout of the host's weight, in float32 or what is more."""
        piece = self.inlay_multi_lora_b[name]
        exact = torch.promote_types(torch.float32, piece.weight.dtype)
        a, factors = self.inlay_multi_lora_a.to(exact), piece.weight.detach().to(exact)
        rank = factors.shape[1]
        shape = self.host.weight.shape
        lookup, transposed = isinstance(self.host, nn.Embedding), isinstance(self.host, Conv1D)
        flat = a if lookup else a.flatten(1).mT  # (d, s r)
        found = torch.zeros(len(flat), self.width_out, dtype=exact, device=a.device)  # (d, m)
        for number, (begin, end) in enumerate(self.parts):
            found[:, begin:end] = flat[:, number * rank : (number + 1) * rank] @ factors[number]
        found *= piece.scale
        return found if lookup or transposed else found.mT.reshape(shape)

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Put tasks into the host's weight."""
        names = [name for name in check_adapters_to_merge(self, adapter_names) if name in self.inlay_multi_lora_b]
        weight = self.host.weight
        for name in names:
            merged = (weight.data + self.delta(name)).to(weight.dtype)
            self.merge_values(name, {"weight": merged}, safe=safe_merge)
