"""PEFT's LoRA with the adapters of a mixed batch in one pass, where PEFT loops over them; in training too.

`mix(model)` turns the layers of PEFT's LoRA, its heads and its tuner into those below, and `unmix(model)` turns them
back. Adapters stay PEFT's: its names, files, `set_adapter`, `load_adapter`, `delete_adapter`, merging.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from peft import PeftModel
from peft.tuners import lora
from peft.tuners.lora.layer import LoraLayer
from peft.utils.other import ModulesToSaveWrapper
from torch import Tensor, nn
from torch.nn.functional import conv2d, dropout, embedding, pad

from inlay.errors import InlayError
from inlay.methods.mixing import BASE, check_names
from inlay.methods.mixture.bank import TaskWeights, weight_of
from inlay.methods.mixture.heads import TaskHead, output_layer, resize
from inlay.methods.mixture.hooks import ModelHooks, check_rows, copies_of
from inlay.methods.mixture.rows import ROUTING, Routing, TaskRows
from inlay.methods.mixture.unmixable import check_model, why_not, why_not_at
from inlay.methods.plain import base_of, plain_name

MADE: dict[tuple[type, type], type] = {}
AnyModel = TypeVar("AnyModel", bound=nn.Module)
QUANTISED = ("Linear8bitLt", "Linear4bit")  # of PEFT, which has them where bitsandbytes is
INSTEAD = "Delete it (delete_adapter), or run it with PEFT alone (inlay.unmix)."


class MixedLora:
    """A layer of PEFT's LoRA. Row i of a batch has its own adapter t, of its own rank:

        y[i] = f(x[i]; W_0) + s_t x[i] A_t^T B_t^T,      s_t = alpha_t / r_t, or alpha_t / sqrt(r_t) (rsLoRA).

    The rows' factors are fetched from their bank, with zeros up to the largest rank among them and for rows without an
    adapter here: two batched products, however many adapters there are. Every adapter that trains does so whichever is
    active.
    """

    routing: Routing
    weights: tuple[TaskWeights, ...]
    # of PEFT's layer
    scaling: dict[str, float]
    lora_bias: dict[str, bool]
    lora_A: nn.ModuleDict
    lora_B: nn.ModuleDict
    lora_dropout: nn.ModuleDict
    base_layer: nn.Module
    training: bool
    merged: bool
    merged_adapters: list[str]
    disable_adapters: bool
    active_adapters: list[str]
    _active_adapter: Any
    _disable_adapters: bool
    _paused: tuple[nn.Parameter, ...] = ()

    def take_part(self, routing: Routing) -> None:
        """Begin to act as one of these."""
        self.routing, self.weights = routing, (TaskWeights(self.lora_A), TaskWeights(self.lora_B))

    @property
    def factors(self) -> dict[str, Any]:
        """What each adapter has here, by name."""
        found: dict[str, Any] = self.lora_A._modules
        return found

    def running(self) -> list[str]:
        """The active adapters that act here."""
        return [] if self.disable_adapters else [name for name in self.active_adapters if name in self.factors]

    def trained(self, name: str) -> list[nn.Parameter]:
        """An adapter's parameters here."""
        found: list[nn.Parameter] = []
        for pieces in (self.lora_A, self.lora_B):
            found += pieces[name].parameters() if name in pieces else ()
        return found

    def set_adapter(self, adapter_names: str | list[str], inference_mode: bool = False) -> None:
        """Choose what acts where a batch names no adapters. Freezes nothing, unless it is for inference."""
        self._active_adapter = [adapter_names] if isinstance(adapter_names, str) else list(adapter_names)
        for name in self._active_adapter:
            for parameter in self.trained(name):
                parameter.requires_grad_(not inference_mode)

    def enable_adapters(self, enabled: bool) -> None:
        """Switch all adapters off or on. What trained before trains again, whichever is active."""
        if not enabled:
            found = [each for name in self.factors for each in self.trained(name) if each.requires_grad]
            self._paused = (*self._paused, *found)
        for parameter in self._paused:
            parameter.requires_grad_(enabled)
        self._paused = () if enabled else self._paused
        self._disable_adapters = not enabled

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        rows = self.routing.rows
        if rows is None or self.disable_adapters:
            if rows is None and not torch.compiler.is_compiling():
                self.routing.refuse_lost_rows(self)
            whole: Tensor = super().forward(x, *args, **kwargs)  # type: ignore[misc]
            return whole
        if self.merged:
            raise InlayError(
                f"{', '.join(self.merged_adapters)} is merged into the base model, where it acts on every row: unmerge "
                "it (unmerge_adapter) before rows of other adapters are run."
            )
        output: Tensor = self.base_layer(x, *args, **kwargs)
        factors = self.factors
        here = [name for name in rows.tasks if name in factors]
        if not here:
            return output
        if torch.is_grad_enabled() and not torch.compiler.is_compiling() and self._trains(here):
            self.routing.refuse_second_trainer()
        if not rows.mixed:
            return self._of_one(here[0], x, output)
        return self._of_rows(rows, here, x, output)

    def _trains(self, names: Sequence[str]) -> bool:
        return any(parameter.requires_grad for name in names for parameter in self.trained(name))

    def _of_one(self, name: str, x: Tensor, output: Tensor) -> Tensor:
        """All rows have one adapter: as PEFT computes it."""
        inner = self.lora_A[name]
        x = x if torch.is_autocast_enabled(x.device.type) else x.to(weight_of(inner).dtype)
        made = self.lora_B[name](inner(self.lora_dropout[name](x))) * self.scaling[name]
        return output + made.to(output.dtype)

    def _of_rows(self, rows: TaskRows, here: Sequence[str], x: Tensor, output: Tensor) -> Tensor:
        a, b = self._factors(rows, torch.is_grad_enabled() and self._trains(here))
        scale = self._scale(rows, here, a)
        x = self._dropped(x.to(a.dtype) if x.dtype != a.dtype else x, rows, here)
        return self._add(output, self._project(rows, x, a), b, scale, rows)

    # ---- where inputs are numbers in the last axis: Linear, Conv1D

    def _project(self, rows: TaskRows, x: Tensor, a: Tensor) -> Tensor:
        """`x A^T` of each row, (rows, tokens, r)."""
        return torch.bmm(rows.by_row(x), a.mT)

    def _add(self, output: Tensor, z: Tensor, b: Tensor, scale: Any, rows: TaskRows) -> Tensor:
        """`output + s z B^T`."""
        b = b.flatten(2).mT
        alpha = scale if isinstance(scale, float) else 1.0
        z = z if isinstance(scale, float) else (z * scale).to(z.dtype)
        bias = self._biases(rows, scale)
        target = rows.by_row(output)
        if target.dtype == z.dtype == b.dtype and not torch.is_autocast_enabled(output.device.type):
            made = torch.baddbmm(target, z, b, alpha=alpha)
        else:
            made = target + (torch.bmm(z, b) * alpha).to(target.dtype)
        made = made if bias is None else made + bias.unsqueeze(1).to(made.dtype)
        return made.view(output.shape)

    # ---- what belongs to the rows

    def _factors(self, rows: TaskRows, tracked: bool) -> list[Tensor]:
        """Each row's A (rows, r, ...) and B (rows, m, r), zero where it has none."""
        found = []
        for weights, axis in zip(self.weights, (0, 1), strict=True):
            # Recomputed layers are traced or come one by one, each with its own.
            kept = not torch.compiler.is_compiling() and not (tracked and self.routing.recomputing)
            own = self._kept(rows, weights, axis, tracked) if kept else None
            if own is None:
                each = [weight_of(weights.factors[t]) if t in weights.factors else None for t in rows.tasks]
                own = stacked(each, axis).index_select(0, _slots(rows, weights))
            found.append(own)
        return found

    def _kept(self, rows: TaskRows, weights: TaskWeights, axis: int, tracked: bool) -> Tensor | None:
        """Those of a factor as the banks have them; None where they do not."""
        if not tracked and self.base_layer.weight.device.type == "cpu":  # a layer's own are still in the cache
            return rows.gathered(weights, self.routing, axis)
        fetched = rows.fetched(weights, self.routing, None, tracked)  # for many layers at once: few kernels
        if not fetched:
            return None
        most = max(one.shape[1 + axis] for one, _ in fetched)
        each = [widened(one, 1 + axis, most) for one, _ in fetched]
        return each[0] if len(each) == 1 else sum(each[1:], each[0])

    def _scale(self, rows: TaskRows, here: Sequence[str], like: Tensor) -> float | Tensor:
        """What the rows' products are multiplied by; where they differ, (rows, 1, 1)."""
        first, device, dtype = self.scaling[here[0]], like.device, like.dtype
        if all(self.scaling[name] == first for name in here):
            return float(first)
        scales = tuple(float(self.scaling.get(task, 0.0)) for task in rows.tasks)
        dtype = torch.promote_types(dtype, torch.float32)  # not rounded to half precision
        kept = rows.kept(("scales", dtype, scales), device, lambda: torch.tensor(scales, dtype=dtype))
        slots = rows.slots(device)
        assert slots is not None
        return kept.index_select(0, slots).view(-1, 1, 1)

    def _biases(self, rows: TaskRows, scale: Any) -> Tensor | None:
        """Each row's `s_t b_t`, (rows, m), where some B has a bias (`lora_bias`)."""
        if not any(self.lora_bias.get(task) for task in rows.tasks):
            return None
        biases = [getattr(self.weights[1].factors.get(task), "bias", None) for task in rows.tasks]
        found = stacked(biases, 0).index_select(0, _slots(rows, self.weights[1]))
        return found * (scale if isinstance(scale, float) else scale.view(-1, 1))

    def _dropped(self, x: Tensor, rows: TaskRows, here: Sequence[str]) -> Tensor:
        if not self.training:
            return x
        modules = self.lora_dropout._modules
        shares = tuple(float(getattr(modules.get(task), "p", 0.0)) if task in here else 0.0 for task in rows.tasks)
        own = {share for share, task in zip(shares, rows.tasks, strict=True) if task in here}
        if not any(own):
            return x
        if len(own) == 1:
            return dropout(x, own.pop())
        left = rows.kept(("left", shares), x.device, lambda: 1 - torch.tensor(shares))
        slots = rows.slots(x.device)
        assert slots is not None
        each = left.index_select(0, slots.repeat_interleave(len(x) // len(slots))).view(-1, *[1] * (x.ndim - 1))
        kept = torch.rand_like(x, dtype=torch.float32) < each
        return x * kept / each.to(x.dtype)

    def leave(self) -> None:
        """Each parameter has memory of its own again."""
        for pieces in (*self.lora_A.parameters(), *self.lora_B.parameters()):
            pieces.data = pieces.data.clone()


class MixedConv2d(MixedLora):
    """Each row's A is a convolution of its own: those of all rows are one, in groups."""

    def _project(self, rows: TaskRows, x: Tensor, a: Tensor) -> Tensor:
        rows.check(x, first=True)
        like: Any = next(iter(self.factors.values()))
        count, rank = a.shape[:2]
        z = conv2d(x.flatten(0, 1)[None], a.flatten(0, 1), None, like.stride, like.padding, like.dilation, count)
        return z.view(count, rank, -1).mT

    def _add(self, output: Tensor, z: Tensor, b: Tensor, scale: Any, rows: TaskRows) -> Tensor:
        made: Tensor = super()._add(output.flatten(2).mT, z, b, scale, rows)
        return made.mT.reshape(output.shape)


class MixedEmbedding(MixedLora):
    """The A of an adapter is a table: each row looks its tokens up in its own."""

    lora_embedding_A: nn.ParameterDict
    lora_embedding_B: nn.ParameterDict

    def take_part(self, routing: Routing) -> None:
        self.routing, self.weights = routing, ()

    @property
    def factors(self) -> dict[str, Any]:
        found: dict[str, Any] = self.lora_embedding_A._parameters
        return found

    def trained(self, name: str) -> list[nn.Parameter]:
        return [own[name] for own in (self.lora_embedding_A, self.lora_embedding_B) if name in own]

    def _of_one(self, name: str, x: Tensor, output: Tensor) -> Tensor:
        # `_embed` and `_get_embed_scale` are PEFT's.
        made = self._embed(x, self.lora_embedding_A[name].T) @ self.lora_embedding_B[name].T  # type: ignore[attr-defined]
        return output + (self._scaled(made) * self.scaling[name]).to(output.dtype)

    def _of_rows(self, rows: TaskRows, here: Sequence[str], x: Tensor, output: Tensor) -> Tensor:
        if len(x) != (rows.count or 0):
            rows.check(x)
        inner, outer = self.factors, self.lora_embedding_B._parameters
        a = stacked([inner.get(task) for task in rows.tasks], 0)  # (tasks, r, entries)
        b = stacked([outer.get(task) for task in rows.tasks], 1)
        slots = rows.slots(x.device)
        assert slots is not None
        tokens = x.reshape(len(slots), -1)
        table = a.mT.reshape(-1, a.shape[1])
        z = embedding(tokens + (slots * a.shape[2])[:, None], table)
        nothing = getattr(self.base_layer, "padding_idx", None)
        if nothing is not None:  # its entry does not learn
            z = torch.where((tokens == nothing)[..., None], z.detach(), z)
        scale = self._scale(rows, here, a)
        z = (z * scale).to(z.dtype)
        made = self._scaled(torch.bmm(z, b.index_select(0, slots).mT))
        return output + made.view(output.shape).to(output.dtype)

    def _scaled(self, made: Tensor) -> Tensor:
        scale = self._get_embed_scale()  # type: ignore[attr-defined]
        return made if scale is None else made * scale.to(made.dtype)

    def leave(self) -> None:
        """Its parameters lie nowhere else."""


def stacked(weights: Sequence[Tensor | None], axis: int) -> Tensor:
    """One for each task, zeros for none; with zeros up to the largest in this axis."""
    there = [weight for weight in weights if weight is not None]
    most = max(weight.shape[axis] for weight in there)
    like = widened(there[0].detach(), axis, most)
    nothing = torch.zeros_like(like)
    return torch.stack([nothing if weight is None else widened(weight, axis, most) for weight in weights])


def widened(tensor: Tensor, axis: int, size: int) -> Tensor:
    """With zeros up to this size in an axis."""
    more = size - tensor.shape[axis]
    return pad(tensor, (*[0, 0] * (tensor.ndim - 1 - axis), 0, more)) if more else tensor


def _slots(rows: TaskRows, weights: TaskWeights) -> Tensor:
    device = weight_of(next(iter(weights.factors.values()))).device
    found = rows.slots(device)
    assert found is not None
    return found


# ---- the tuner


class MixedTuner:
    """PEFT's LoRA model, with one pass for all adapters."""

    model: nn.Module
    peft_config: dict[str, Any]
    active_adapters: list[str]
    set_adapter: Any
    outputs_expected: int | None = None
    """Of the head of the adapter that is about to be added; None: as many as the base model's."""

    @property
    def routing(self) -> Routing:
        """What the layers and heads on this base model share."""
        return Routing.of(self.model)

    def inject_adapter(self, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        """Add an adapter, and let its new layers and heads take part."""
        super().inject_adapter(model, adapter_name, *args, **kwargs)  # type: ignore[misc]
        _adopt(self)
        trains = not self.peft_config[adapter_name].inference_mode
        for head in self._heads_of(adapter_name):  # which PEFT freezes where another adapter is the active one
            head.modules_to_save[adapter_name].requires_grad_(trains)
        outputs, self.outputs_expected = self.outputs_expected, None
        if outputs is not None and self._heads_of(adapter_name):
            self.size_head(adapter_name, outputs, 0)

    def size_head(self, task: str, outputs: int | None, seed: int) -> None:
        """Give an adapter a head of so many outputs, drawn from the seed; as many as the base model's are left."""
        resize(self._heads_of(task), self.model, task, outputs, seed)

    def _heads_of(self, adapter_name: str) -> list[TaskHead]:
        return [head for head in self.routing.heads.values() if adapter_name in head.modules_to_save]

    def delete_adapter(self, adapter_name: str) -> None:
        """Take an adapter out; the memory that it lay in goes with the next pass."""
        super().delete_adapter(adapter_name)  # type: ignore[misc]
        for weights in self.routing.weights():
            weights.banks = {}

    def outputs_of(self, adapter_name: str) -> int | None:
        """How many outputs an adapter's own head has."""
        for head in reversed(self._heads_of(adapter_name)):
            place = output_layer(dict(head.original_module.named_modules()), base_of(self.model))
            if place is not None:
                found: int = head.modules_to_save[adapter_name].get_submodule(place).out_features
                return found
        return None

    def counted_parameters(self) -> dict[str, int]:
        """`trained`: the factors of all adapters; they share none. Heads are not counted."""
        layers, names = self.routing.layers.values(), list(self.peft_config)
        own = [parameter for layer in layers for name in names for parameter in layer.trained(name)]
        return {"shared": 0, "trained": sum(parameter.numel() for parameter in own)}

    @contextmanager
    def _enable_peft_forward_hooks(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        names = kwargs.get("adapter_names")
        if names is None:
            with super()._enable_peft_forward_hooks(*args, **kwargs):  # type: ignore[misc]
                yield
            return
        routing = self.routing
        check_names(names, list(self.peft_config))
        rows = routing.rows_of(names, list(self.peft_config))
        for name in rows.tasks:
            if name != BASE and (why := unmixable(self, name)) is not None:
                raise InlayError(f"Adapter {name!r} cannot be mixed with others in one pass: {why}. {INSTEAD}")
        if check_rows(self.model, args, kwargs, rows):  # as `generate` is called: it repeats them itself
            rows.copies = copies_of(self.model, kwargs)
        with routing.remembering(rows):
            yield

    def _unload_and_optionally_merge(self, *args: Any, **kwargs: Any) -> nn.Module:
        _let_go(self)  # of whose class it then is
        found: nn.Module = type(self)._unload_and_optionally_merge(self, *args, **kwargs)
        return found


def unmixable(tuner: Any, name: str) -> str | None:
    """Why an adapter cannot share a pass with others; None where it can."""
    reasons: dict[str, str] = tuner.routing.reasons
    return why_not(tuner.peft_config[name]) or reasons.get(name)


def _why_not(layer: Any, name: str) -> str | None:
    """Why an adapter's part of a layer cannot be mixed."""
    base = layer.get_base_layer()
    if name in layer.lora_variant:
        return f"it is a {type(layer.lora_variant[name]).__name__.removesuffix('Variant')}"
    if _kind(layer) is None:
        return f"it adapts {type(base).__name__} by PEFT's {type(layer).__name__}"
    if getattr(base, "groups", 1) != 1:
        return "it adapts a convolution in groups"
    if getattr(base, "max_norm", None) is not None or getattr(layer, "tp_layer", None) is not None:
        return f"it adapts a {type(base).__name__} with max_norm or in parallel parts"
    return None


def _kind(layer: LoraLayer) -> type[MixedLora] | None:
    """What a layer of PEFT's becomes."""
    if isinstance(layer, lora.Conv2d):
        return MixedConv2d
    if isinstance(layer, lora.Embedding):
        return MixedEmbedding
    if isinstance(layer, lora.Linear) or type(layer).__name__ in QUANTISED:
        return MixedLora
    return None


def _mixed(kind: type, of: type) -> type:
    """PEFT's class with ours before it, one for each."""
    found = MADE.get((kind, of))
    if found is None:
        found = MADE[kind, of] = type(f"Mixed{of.__name__}", (kind, of), {"__module__": of.__module__})
    return found


def _adopt(tuner: Any) -> None:
    """Let the layers and heads that do not take part yet do so."""
    routing: Routing = tuner.routing
    routing.reasons = {}
    for config in tuner.peft_config.values():
        if config.modules_to_save:  # PEFT adds its own names for a head to the list that it is given, every time
            config.modules_to_save = list(dict.fromkeys(config.modules_to_save))
    if not routing.handles:
        ModelHooks(tuner.model, routing, tuner.outputs_of)
    for name, module in tuner.model.named_modules():
        if isinstance(module, ModulesToSaveWrapper):
            if not isinstance(module, TaskHead):
                head = TaskHead.adopt(module, routing)
                head.lacking_is_base = True
                routing.heads[plain_name(name)] = head
        elif isinstance(module, LoraLayer):
            kind = _kind(module)
            for adapter in tuner.peft_config:
                if adapter in module.scaling:
                    why = why_not_at(plain_name(name)) or _why_not(module, adapter)
                    if why is not None:
                        routing.reasons.setdefault(adapter, f"at {plain_name(name)} {why}")
                    elif any(plain_name(name).startswith(f"{head}.") for head in routing.heads):
                        told = f"it adapts {plain_name(name)}, a part of what adapters have of their own"
                        routing.reasons.setdefault(adapter, f"{told} (modules_to_save)")
            if kind is not None and not isinstance(module, MixedLora):
                module.__class__ = _mixed(kind, type(module))
                module.take_part(routing)
                routing.layers[plain_name(name)] = module


def _let_go(tuner: Any) -> None:
    """Make PEFT's own of the layers and heads again."""
    routing: Routing = tuner.routing
    for layer in routing.layers.values():
        layer.leave()
        del layer.routing, layer.weights
        layer.__class__ = type(layer).__bases__[1]
    for head in routing.heads.values():
        head.__class__ = ModulesToSaveWrapper
        del head.routing
    for handle in routing.handles:
        handle.remove()
    delattr(tuner.model, ROUTING)
    tuner.__class__ = type(tuner).__bases__[1]


# ---- for users


def mix(model: AnyModel) -> AnyModel:
    """Let a PEFT model with LoRAs run mixed batches in one pass, whatever their ranks, scales and heads:

        inlay.mix(model)
        model(**batch, adapter_names=["a", "b", "__base__", ...])  # one name a row; in `generate` and in training too

    The model is changed in place and given back. Adapters may be added, loaded and deleted afterwards; a head may have
    another number of outputs than the others', with -inf in the place of those that a row's own has not. Every adapter
    that was loaded for training trains, whichever is active: a row's loss reaches its own adapter alone. What is no
    low-rank product of its own rows (DoRA, aLoRA, ...) is refused, by name. `inlay.unmix(model)` undoes it.
    """
    tuner: Any = getattr(model, "base_model", None)
    if isinstance(tuner, MixedTuner):
        return model
    if not isinstance(model, PeftModel) or type(tuner) is not lora.LoraModel:
        what = (
            f"{type(model).__name__} of {type(tuner).__name__}"
            if isinstance(model, PeftModel)
            else type(model).__name__
        )
        raise InlayError(
            f"inlay.mix takes a PeftModel with LoRAs, as PeftModel.from_pretrained and get_peft_model give, not a "
            f"{what}. Adapters of inlay's own methods are mixed by adapter_names without it."
        )
    check_model(tuner.model)
    if ROUTING in tuner.model.__dict__:
        raise InlayError("The base model mixes tasks of another PEFT model already: load it a second time.")
    tuner.__class__ = _mixed(MixedTuner, type(tuner))
    _adopt(tuner)
    for name in tuner.peft_config:
        if (why := unmixable(tuner, name)) is not None:
            _let_go(tuner)
            raise InlayError(f"Adapter {name!r} cannot be mixed with others in one pass: {why}. {INSTEAD}")
    _train(tuner, True)
    return model


def unmix(model: AnyModel) -> AnyModel:
    """Undo `inlay.mix`: PEFT's own passes again, with the active adapter alone in training."""
    tuner: Any = getattr(model, "base_model", None)
    if not isinstance(tuner, MixedTuner):
        raise InlayError(f"This {type(model).__name__} was not mixed by inlay.mix: there is nothing to undo.")
    _train(tuner, False)
    _let_go(tuner)
    if active := list(tuner.active_adapters):
        tuner.set_adapter(active, inference_mode=tuner.peft_config[active[0]].inference_mode)
    return model


def _train(tuner: Any, whether: bool) -> None:
    """PEFT freezes what is not active; here every adapter trains that was made or loaded to."""
    routing: Routing = tuner.routing
    for name, config in tuner.peft_config.items():
        for layer in routing.layers.values():
            for parameter in layer.trained(name):
                parameter.requires_grad_(whether and not config.inference_mode)
        for head in routing.heads.values():
            if name in head.modules_to_save:
                head.modules_to_save[name].requires_grad_(whether and not config.inference_mode)
