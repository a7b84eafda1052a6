"""Bottleneck adapters: small networks set into every block, after attention and after the feed-forward."""

from types import MappingProxyType
from typing import Any

from inlay.methods.registry import Method

_SAME: dict[str, Any] = {
    "family": "adapter",
    "config": "inlay.methods.bottleneck_adapter.config:BottleneckAdapterConfig",
    "tuner": "inlay.methods.bottleneck_adapter.model:BottleneckAdapterModel",
    "peft_type": "INLAY_ADAPTER",
    "parameter_prefix": "inlay_adapter_",
    "learning_rate": 3e-3,
    "grid": (3e-4, 1e-3, 3e-3, 1e-2),
    "unmergeable": "its bottleneck has an activation function, which no weight can hold",
}
METHODS = (
    Method(
        name="adapter",
        summary="Inserts a small bottleneck after attention and after the feed-forward (Houlsby).",
        paper="Houlsby et al., ICML 2019, https://arxiv.org/abs/1902.00751",
        **_SAME,
    ),
    Method(
        name="adapter-pfeiffer",
        summary="Inserts a small bottleneck after the feed-forward alone (Pfeiffer).",
        paper="Pfeiffer et al., AdapterFusion, EACL 2021, https://arxiv.org/abs/2005.00247",
        settings=MappingProxyType({"placement": "pfeiffer"}),
        **_SAME,
    ),
)
