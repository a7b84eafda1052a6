"""Norm tuning of one normalisation layer."""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from typing import Any

import torch
from peft.tuners.tuners_utils import check_adapters_to_merge
from torch import Tensor, nn

from inlay.errors import InlayError
from inlay.methods.channels import PLAIN_NORMS, sums_roughly
from inlay.methods.norm.config import NormTuningConfig
from inlay.methods.tuner import ChildLayer


class NormLayer(ChildLayer):
    """Computes its host with a scale and a shift of its own:

        y = (x - mean) / sqrt(var + eps) * gamma' + beta',      gamma' = gamma, beta' = beta at the start,

    and likewise for norms without mean or shift. Each adapter is a copy of the host that runs in its place, since every
    architecture writes its norm a little differently. The copies stay in eval mode: a batch norm's would otherwise
    normalise by the batch and move its statistics.
    """

    adapter_layer_names = ("inlay_norm_copy",)
    merges_into = ("weight", "bias")
    mixes = True

    def attach(self) -> None:
        # An instance attribute shadows the class's forward; another one may be there already (Accelerate's hooks).
        self._earlier = self.host.__dict__.get("forward")
        self.host.forward = self.route

    def detach(self) -> None:
        del self.host.forward
        if self._earlier is not None:
            self.host.forward = self._earlier

    def update_layer(self, adapter_name: str, config: NormTuningConfig) -> None:
        copy = deepcopy(self._bare_host())
        copy.requires_grad_(True)
        for key, parameter in copy.named_parameters(recurse=False):
            copy.register_parameter(key, parameter)  # left empty here where weights are to be left empty
        self.pieces[adapter_name] = copy.eval()

    def _bare_host(self) -> nn.Module:
        """A shallow copy of the host without what adapters have hung on it."""
        bare = self.host.__class__.__new__(self.host.__class__)
        bare.__dict__.update(self.host.__dict__)
        bare.__dict__.pop("forward", None)
        bare.__dict__["_modules"] = {}
        for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
            bare.__dict__[name] = type(self.host.__dict__[name])()
        return bare

    def replaces_host(self) -> bool:
        """A copy runs, of some rows at least."""
        mixed = self._mixed is not None and self.row_names() is not None and not self.disable_adapters
        return mixed or bool(self.running())

    def train(self, mode: bool = True) -> NormLayer:
        """Stays in eval mode."""
        return super().train(False)

    def route(self, *args: Any, **kwargs: Any) -> Tensor:
        """The host's forward: the active adapter's copy, or the host itself."""
        names = self.running()
        if len(names) == 1 and self._mixed is None:
            return self._normed(names[0], *args, **kwargs)
        forward = self._earlier or partial(type(self.host).forward, self.host)
        rows = self.row_names()
        if rows is not None and not self.disable_adapters:
            x, *others = (*args, *kwargs.values())
            if any(isinstance(other, Tensor) for other in others):
                raise InlayError(f"{type(self.host).__name__} reads more than features: run one adapter at a time.")
            made = forward(*args, **kwargs)
            return self.by_row(rows, x, made, self._normed, self.pieces)
        if not names:
            return forward(*args, **kwargs)
        if len(names) > 1:
            raise InlayError(f"Norm tuning runs one adapter at a time, not {', '.join(names)}: call set_adapter.")
        return self._normed(names[0], *args, **kwargs)

    def _normed(self, adapter_name: str, *args: Any, **kwargs: Any) -> Tensor:
        """What an adapter's copy computes."""
        copy: Any = self.pieces[adapter_name]
        own, trained = self.host._parameters.get("weight"), copy._parameters.get("weight")
        if own is None or trained is None:  # FSDP has flattened them away
            return copy(*args, **kwargs)
        compute = PLAIN_NORMS.get(type(copy)) if len(args) == 1 else None
        if own.dtype == trained.dtype and (compute is None or not sums_roughly(args[0])):
            return copy(*args, **kwargs)
        # PEFT keeps adapters in float32; the norm computes in the base model's precision, as the host would.
        if compute is not None:
            bias = copy._parameters.get("bias")
            return compute(copy, args[0], trained.to(own.dtype), None if bias is None else bias.to(own.dtype))
        cast = {name: parameter.to(own.dtype) for name, parameter in copy.named_parameters()}
        return torch.func.functional_call(copy, cast, args, kwargs)

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Put an adapter's scale and shift into the host."""
        names = [name for name in check_adapters_to_merge(self, adapter_names) if name in self.pieces]
        if len(names) + len(self.merged_adapters) > 1:
            raise InlayError(f"Norm tuning merges one adapter, not {', '.join([*self.merged_adapters, *names])}.")
        for name in names:
            trained = dict(self.pieces[name].named_parameters())
            hosts = dict(self.host.named_parameters(recurse=False))
            copies = {key: trained[key].data.to(parameter.dtype, copy=True) for key, parameter in hosts.items()}
            self.merge_values(name, copies, safe=safe_merge)
