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
from inlay.methods.attention_interface import Attend, AttentionLayer
from inlay.methods.ntk_attention.start import Start

IMPLEMENTATIONS = ("sdpa", "eager")


class LoadedParameter(nn.Module):
    """One parameter; what is loaded into it must fit and be finite."""

    weight: Tensor

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self) -> Tensor:
        return self.weight

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        found = state_dict.get(f"{prefix}weight")
        if found is not None and found.shape != self.weight.shape:
            raise InlayError(
                f"{prefix}weight has shape {list(found.shape)}, and this model needs {list(self.weight.shape)}: the "
                "adapter was trained on a model with heads of another size or number. Load it into that one."
            )
        if found is not None and not found.is_meta and not torch.isfinite(found).all():
            raise InlayError(f"{prefix}weight holds values that are not finite. Train the adapter again.")
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


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
    """What stands for the prefix in one adapter: `Z_A`, `Z_B` and `kappa` of each query head."""

    def __init__(self, start: Start) -> None:
        super().__init__()
        self._phi = start.features
        self.z_a = LoadedParameter(start.z_a)
        self.z_b = LoadedParameter(start.z_b)
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

    def forward(self) -> tuple[Tensor, Tensor, Tensor]:
        return _value(self.z_a), _value(self.z_b), _value(self.kappa)

    def given(self) -> tuple[Tensor, Tensor, Tensor, bool]:
        """The same, but rho in place of kappa, and True, where nobody waits for the call: some kernels take rho."""
        parts = self._modules  # looked up where nn.Module keeps them: its own way takes longer than the call
        z_a, z_b, kappa = parts["z_a"], parts["z_b"], parts["kappa"]
        assert z_a is not None
        assert z_b is not None
        assert kappa is not None
        signed = type(kappa) is Kappa and not kappa._forward_pre_hooks
        return _value(z_a), _value(z_b), _weight(kappa) if signed else _value(kappa), signed


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


class NTKAttentionLayer(AttentionLayer):
    """Of one head, with q, k, v as the attention function receives them (after rotary embedding):

        T = (exp(q k^T scale) v + phi(q) Z_A Z_B) / (exp(q k^T scale) 1 + phi(q) kappa)

    Mask, causality, bias of position and dropout concern the keys alone: every query sees the whole prefix. The
    prefixes of several running adapters stand one beside the other: their numerators and denominators add up.
    """

    child = "inlay_ntk"
    innermost = True
    adapter_layer_names = ("inlay_ntk_prefix",)

    def update_layer(self, adapter_name: str, start: Start) -> None:
        self.pieces[adapter_name] = TrainedPrefix(start)

    def attend(
        self, previous: Attend, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        implementation = self.implementation
        if implementation not in IMPLEMENTATIONS or "softcap" in kwargs or "s_aux" in kwargs:
            self._check(implementation, kwargs)
        names = self.running()
        bias = kwargs.get("position_bias")
        z_a, z_b, kappa, signed = self._prefixes(names)
        seen: dict[str, Any] = {
            "feature_map": self._prefix(names[0]).features,
            "scale": kwargs.get("scaling"),
            "attn_mask": mask if bias is None else _with_bias(mask, bias),
            "is_causal": mask is None
            and implementation != "eager"
            and query.shape[2] > 1
            and self._is_causal(kwargs.get("is_causal")),
            "signed": signed,
        }
        output = ntk_attention(query, key, value, (z_a, z_b), kappa, dropout_p=kwargs.get("dropout") or 0.0, **seen)
        weights = None
        if implementation == "eager":
            # The keys' share of the denominator: what attention to values of 1 gives.
            ones = torch.ones_like(value[..., :1])
            share = ntk_attention(query, key, ones, torch.zeros_like(kappa).unsqueeze(-1), kappa, **seen)
            weights = previous(self.host, query, key, value, mask, **kwargs)[1]
            weights = None if weights is None else weights * share
        return output.transpose(1, 2).contiguous(), weights

    def _is_causal(self, is_causal: bool | None) -> bool:
        """As `sdpa` in Transformers decides where there is no mask; a single query is the last, and sees all keys."""
        return bool(getattr(self.host, "is_causal", True) if is_causal is None else is_causal)

    def _prefix(self, name: str) -> TrainedPrefix:
        """That of one adapter, looked up where nn.Module keeps it."""
        found: Any = self._modules[self.adapter_layer_names[0]]
        piece: TrainedPrefix = found._modules[name]
        return piece

    def _prefixes(self, names: list[str]) -> tuple[Tensor, Tensor, Tensor, bool]:
        """Z_A, Z_B and kappa of all running adapters, as if of one: `[A_1 A_2] [B_1; B_2] = A_1 B_1 + A_2 B_2`; and
        whether it is rho that stands for kappa."""
        prefixes = [self._prefix(name) for name in names]
        if len(prefixes) == 1:
            return prefixes[0].given()
        found = [prefix() for prefix in prefixes]
        alike = {(prefix.features, kappa.shape) for prefix, (_, _, kappa) in zip(prefixes, found, strict=True)}
        if len(alike) > 1 or any(prefix.centre is not None for prefix in prefixes):
            raise InlayError(
                f"The adapters {', '.join(names)} have different feature maps (or each the centre of its own "
                "prompt), and run one at a time: model.set_adapter(name). To run them together, train them with one "
                "feature_map, feature_multiplier and seed, and no start='text' of taylor or favor."
            )
        left, right, kappas = zip(*found, strict=True)
        return torch.cat(left, -1), torch.cat(right, -2), torch.stack(kappas).sum(0), False

    def _check(self, implementation: str, kwargs: dict[str, Any]) -> None:
        if implementation not in IMPLEMENTATIONS:
            raise InlayError(
                f"ntk-attention computes attention itself and reads the masks of {' and '.join(IMPLEMENTATIONS)}, not "
                f'of {implementation!r}: model.set_attn_implementation("sdpa").'
            )
        for name in ("softcap", "s_aux"):
            if kwargs.get(name) is not None:
                raise InlayError(
                    f"{type(self.host).__name__} changes its scores by {name!r}: ntk-attention knows the plain softmax "
                    "only. Take another method for this model."
                )


def _with_bias(mask: Tensor | None, bias: Tensor) -> Tensor:
    """What is added to the scores, a bias of position included; hidden keys get what Transformers gives them."""
    if mask is None:
        return bias
    if mask.dtype == torch.bool:
        return torch.where(mask, bias, torch.finfo(bias.dtype).min)
    return bias + mask
