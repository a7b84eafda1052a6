# %% [markdown]
# # Add a method of your own
#
# **The question.** You have an idea for a method. How much must you write until `inlay` trains it, compares it and saves it?
#
# **The answer.** Four short files: a description, the settings, the layer, and where the layers go. Together they have about 60 lines. No file
# of `inlay` changes: your package declares the method in the entry-point group `inlay.methods`.
#
# The method here is called `volume`. It gives every linear layer of the model one trained number $s$:
#
# $$y = (1 + s)\, f(x), \qquad s = 0 \text{ at the start}$$
#
# It is about the smallest method there is: 36 numbers for this model. They do not make it better than a new head alone, as the table below says.

# %%
import os
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
from IPython.display import display

import inlay

SMALL = os.environ.get("INLAY_NOTEBOOKS") == "small"  # a quick check: few images, few steps


def write(path: str, text: str) -> None:
    """A file of the package, in this folder."""
    Path(path).parent.mkdir(exist_ok=True)
    Path(path).write_text(text.lstrip())


# %% [markdown]
# ## 1. The description
#
# Data only. This file must not import torch or PEFT, because `inlay methods` reads it.

# %%
write(
    "volume_method/__init__.py",
    '''
"""Volume: one trained number for every linear layer."""

from inlay.methods.registry import Method

METHOD = Method(
    name="volume",
    summary="Multiplies the output of every linear layer by one trained number.",
    paper="An example, https://example.org/",
    config="volume_method.config:VolumeConfig",
    tuner="volume_method.model:VolumeModel",
    peft_type="INLAY_VOLUME",
    parameter_prefix="inlay_volume_",
    learning_rate=1e-2,
    grid=(3e-3, 1e-2, 3e-2),
)
''',
)

# %% [markdown]
# ## 2. The settings
#
# Which layers to adapt is inherited. A setting of your own would be one more field of this dataclass.

# %%
write(
    "volume_method/config.py",
    '''
"""The settings of volume."""

from dataclasses import dataclass

from peft.utils.peft_types import PeftType

from inlay.methods.config import InlayConfig


@dataclass
class VolumeConfig(InlayConfig):
    """Which linear layers to adapt; by default all."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.peft_type = PeftType("INLAY_VOLUME")
''',
)

# %% [markdown]
# ## 3. The layer
#
# It is a child of the module that it adapts. A `ChannelLayer` says only what one adapter makes of the module's output.

# %%
write(
    "volume_method/layer.py",
    '''
"""Volume, of one linear layer."""

import torch
from torch import nn

from inlay.methods.tuner import ChannelLayer


class Volume(nn.Module):
    """`s` of one adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, output):
        return output * (1 + self.weight).to(output.dtype)


class VolumeLayer(ChannelLayer):
    """y = (1 + s) f(x)."""

    adapter_layer_names = ("inlay_volume_number",)

    def update_layer(self, adapter_name, config):
        self.pieces[adapter_name] = Volume().to(self.host.weight.device)

    def act(self, adapter_name, output):
        return self.pieces[adapter_name](output)
''',
)

# %% [markdown]
# ## 4. Where the layers go

# %%
write(
    "volume_method/model.py",
    '''
"""The tuner of volume."""

from torch import nn

from inlay.methods.tuner import InlayTuner
from volume_method.layer import VolumeLayer


class VolumeModel(InlayTuner):
    """`get_peft_model(model, VolumeConfig())` makes one of these."""

    prefix = "inlay_volume_"
    child = "inlay_volume"
    tuner_layer_cls = VolumeLayer

    @classmethod
    def fits(cls, module):
        return isinstance(module, nn.Linear)

    @classmethod
    def refusal(cls, model):
        return f"volume adapts linear layers, and {type(model).__name__} has none. Use another model."
''',
)

# %% [markdown]
# ## 5. Declare it
#
# In a package of yours, `pyproject.toml` has two lines, and `pip install` does the rest:
#
#     [project.entry-points."inlay.methods"]
#     volume = "volume_method"
#
# The notebook installs nothing. It writes the file that `pip` would write, in this folder.

# %%
write("volume_method-0.1.dist-info/METADATA", "Metadata-Version: 2.1\nName: volume_method\nVersion: 0.1\n")
write("volume_method-0.1.dist-info/entry_points.txt", "[inlay.methods]\nvolume = volume_method\n")
sys.path.insert(0, str(Path.cwd()))

from inlay.methods.registry import get

print(get("volume").summary)

# %% [markdown]
# ## Train it, beside others
#
# From here on `volume` is a method like every other: for `tune`, `compare`, `predict`, `report` and `get_peft_model`.

# %%
spec = inlay.Spec(
    model="embedded:vit",
    task="digits",
    method="volume",
    shots=60 if SMALL else 200,
    epochs=1 if SMALL else 5,
    batch_size=16,
)
found = inlay.compare(spec, ["linear-probe", "volume", "bias"], seeds=2 if SMALL else 3, progress=False)
head = next(row.trained for row in found.rows if row.method == "linear-probe")
table = pd.DataFrame(
    [
        {
            "method": row.method,
            "test accuracy": f"{row.mean:.3f} ± {row.interval:.3f}",
            "parameters, without the head": f"{row.trained - head:,}",
        }
        for row in found.rows
    ]
)
display(table.set_index("method"))

# %% [markdown]
# ## What did it learn?
#
# One number for each layer can be looked at. The run is loaded as a PEFT model, and the trained numbers are its parameters.
# The query's and the key's numbers of a block come out equal: attention sees only their product.

# %%
run = next(run for run in found.runs if run.record["spec"]["method"] == "volume")
model = inlay.load(run).model
numbers = {
    name.partition(".inlay_volume")[0].removeprefix("base_model.model."): 1 + value.item()
    for name, value in model.named_parameters()
    if "inlay_volume" in name
}
figure, axes = plt.subplots(figsize=(9, 3))
axes.bar(range(len(numbers)), [value - 1 for value in numbers.values()], bottom=1, color="teal")
axes.axhline(1, color="grey", linewidth=0.8)
axes.set_xlabel(f"the {len(numbers)} linear layers, from the first to the last")
axes.set_ylabel("1 + s")
axes.spines[["top", "right"]].set_visible(False)
plt.savefig("volume.png", bbox_inches="tight")

# %%
most = sorted(numbers, key=lambda name: abs(numbers[name] - 1), reverse=True)[:5]
display(pd.DataFrame({"1 + s": {name: round(numbers[name], 3) for name in most}}))

# %% [markdown]
# ## What to try next
#
# - Change the equation in `layer.py`: a vector in place of a number, or a term that depends on $x$.
# - Let it be merged into the weights, adapt modules by their place, serve several adapters in one batch:
#   [add a method](../docs/add-a-method.md) lists every fact and hook.
# - In a checkout, put the folder into `src/inlay/methods/`: the test matrix then runs it on every architecture.
