"""A bottleneck adapter after one projection (Houlsby et al. 2019, section 2.1)."""

from __future__ import annotations

from torch import Tensor

from inlay.methods.bottleneck import Bottleneck
from inlay.methods.bottleneck_adapter.config import BottleneckAdapterConfig
from inlay.methods.channels import width_out
from inlay.methods.tuner import ChannelLayer


class AdapterLayer(ChannelLayer):
    """After its host, the last projection of attention or of the feed-forward, with output `y`:

        y + B(y),      B(y) = W_up act(W_down y + b_down) + b_up = 0 at the start.

    The block's own residual sum comes after it.
    """

    adapter_layer_names = ("inlay_adapter_bottleneck",)

    def update_layer(self, adapter_name: str, config: BottleneckAdapterConfig) -> None:
        width = width_out(self.host)
        factor = config.reduction_factor
        self.pieces[adapter_name] = Bottleneck(
            self.host,
            width,
            config.bottleneck if factor is None else max(1, round(width / factor)),
            activation=config.activation,
            dropout=config.dropout,
            up_std=config.init_std,
        )

    def act(self, adapter_name: str, output: Tensor) -> Tensor:
        """`y + B(y)`."""
        return output + self.pieces[adapter_name](output)
