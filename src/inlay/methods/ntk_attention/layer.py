"""NTK-Attention (Liang et al. 2024, Algorithm 2) inside one attention module."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from inlay.attention import FeatureMap, ntk_attention
from inlay.attention.features import Centred
from inlay.attention.term import magnitude
from inlay.errors import InlayError
from inlay.methods.loaded import LoadedParameter
from inlay.methods.ntk_attention.first import sees_one
from inlay.methods.ntk_attention.start import Start
from inlay.methods.softmax_layer import SoftmaxLayer


class Kappa(LoadedParameter):
    """`kappa = |rho|`, with derivative +1 at 0: it starts at 0, leaves it at the first step, and is never negative."""

    def forward(self) -> Tensor:
        return magnitude(self.weight)


class Fixed(LoadedParameter):
    """Saved but not trained: the centre of the keys; and kappa as Eq. (4) gave it, where features may be negative and
    no other is sure to keep `phi(q) kappa` positive."""

    def __init__(self, weight: Tensor) -> None:
        nn.Module.__init__(self)
        self.register_buffer("weight", weight)


PARAMETERS = (LoadedParameter, Kappa, Fixed)


class TrainedPrefix(nn.Module):
    """The prefix parameters of one adapter: `Z_A`, `Z_B` and `kappa` of each query head. Without a `Z_B`, the first is
    Z."""

    def __init__(self, start: Start) -> None:
        super().__init__()
        self._phi = start.features
        self.skip_first = start.skip_first
        self.z_a = LoadedParameter(start.z_a)
        self.z_b = None if start.z_b is None else LoadedParameter(start.z_b)
        self.kappa = (Kappa if start.features.positive else Fixed)(start.kappa)
        self.centre = None if start.centre is None else Fixed(start.centre)

    @property
    def features(self) -> FeatureMap:
        """phi, about the centre as it was moved or loaded since."""
        if self.centre is None:
            return self._phi
        assert isinstance(self._phi, Centred)
        return replace(self._phi, centre=self.centre())

    @torch.no_grad()
    def begin(self, start: Start) -> None:
        """Begin again, elsewhere."""
        for name in ("z_a", "z_b", "kappa", "centre"):
            part, found = getattr(self, name), getattr(start, name)
            if part is not None:
                part.weight.copy_(found)

    def forward(self) -> tuple[Tensor, Tensor | None, Tensor]:
        return _value(self.z_a), None if self.z_b is None else _value(self.z_b), _value(self.kappa)

    def given(self) -> tuple[Tensor, Tensor | None, Tensor, bool]:
        """The same, but rho in place of kappa, and True, where nobody waits for the call: some kernels take rho."""
        parts = self._modules  # looked up where nn.Module keeps them: its own way takes longer than the call
        z_a, z_b, kappa = parts["z_a"], parts.get("z_b"), parts["kappa"]
        assert z_a is not None
        assert kappa is not None
        signed = type(kappa) is Kappa and not kappa._forward_pre_hooks
        right = None if z_b is None else _value(z_b)
        return _value(z_a), right, _weight(kappa) if signed else _value(kappa), signed


def _value(module: nn.Module) -> Tensor:
    """What a parameter's module gives; by a full call, which costs several times as much, only where someone waits for
    it: FSDP changes the class, DeepSpeed hangs on the call."""
    kind = type(module)
    if kind is LoadedParameter and not module._forward_pre_hooks:
        return _weight(module)
    found: Tensor = module() if kind not in PARAMETERS or module._forward_pre_hooks else module.forward()
    return found


def _weight(module: nn.Module) -> Tensor:
    found = module._parameters.get("weight")
    return module.weight if found is None else found


class NTKAttentionLayer(SoftmaxLayer):
    """Of one head, with q, k, v as the attention function receives them (after rotary embedding):

        T = (exp(q k^T scale) v + phi(q) Z_A Z_B) / (exp(q k^T scale) 1 + phi(q) kappa)

    Mask, causality, bias of position and dropout concern the keys alone: every query sees the whole prefix. The
    prefixes of several running adapters stand one beside the other: their numerators and denominators add up.

    With `skip_first` a query that sees one key j only gets `v_j`, as in the base model.
    """

    child = "inlay_ntk"
    adapter_layer_names = ("inlay_ntk_prefix",)

    def update_layer(self, adapter_name: str, start: Start) -> None:
        self.pieces[adapter_name] = TrainedPrefix(start)

    def softmax(
        self, query: Tensor, key: Tensor, value: Tensor, dropout_p: float, shares: bool, **how: Any
    ) -> tuple[Tensor, Tensor | None]:
        names = self.running()
        z_a, z_b, kappa, signed = self._prefixes(names)
        how |= {"feature_map": self._prefix(names[0]).features, "signed": signed}
        z = z_a if z_b is None else (z_a, z_b)
        skips = self._prefix(names[0]).skip_first
        one = sees_one(query, key, how["attn_mask"], how["is_causal"]) if skips else None
        output = ntk_attention(query, key, value, z, kappa, dropout_p=dropout_p, **how)
        output = output if one is None else one.give(output, value)
        if not shares:
            return output, None
        # What attention to values of 1 gives.
        ones, nothing = torch.ones_like(value[..., :1]), torch.zeros_like(kappa).unsqueeze(-1)
        share = ntk_attention(query, key, ones, nothing, kappa, **how)
        return output, share if one is None else one.give(share, ones)

    def _prefix(self, name: str) -> TrainedPrefix:
        """That of one adapter, looked up where nn.Module keeps it."""
        found: Any = self._modules[self.adapter_layer_names[0]]
        piece: TrainedPrefix = found._modules[name]
        return piece

    def _prefixes(self, names: list[str]) -> tuple[Tensor, Tensor | None, Tensor, bool]:
        """Z_A, Z_B and kappa of all running adapters, as if of one: `[A_1 A_2] [B_1; B_2] = A_1 B_1 + A_2 B_2`; and
        whether it is rho that stands for kappa."""
        prefixes = [self._prefix(name) for name in names]
        if len(prefixes) == 1:
            return prefixes[0].given()
        found = [prefix() for prefix in prefixes]
        alike = {
            (prefix.features, prefix.skip_first, kappa.shape)
            for prefix, (_, _, kappa) in zip(prefixes, found, strict=True)
        }
        if len(alike) > 1 or any(prefix.centre is not None for prefix in prefixes):
            raise InlayError(
                f"The adapters {', '.join(names)} have different feature maps (or each the centre of its own "
                "prompt), and run one at a time: model.set_adapter(name). To run them together, train them with one "
                "feature_map, feature_multiplier, skip_first and seed, and neither start='text' nor centred."
            )
        left, right, kappas = zip(*found, strict=True)
        if None in right:  # Z is Z times the identity
            size = left[right.index(None)].shape[-1]
            whole = torch.eye(size, dtype=left[0].dtype, device=left[0].device).expand(len(left[0]), -1, -1)
            right = tuple(whole if part is None else part for part in right)
        return torch.cat(left, -1), torch.cat(right, -2), torch.stack(kappas).sum(0), False
