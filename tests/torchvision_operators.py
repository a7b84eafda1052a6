"""A pytest plugin for the tests of timm: torchvision becomes importable beside a PyTorch that it was not built for.

timm imports torchvision. The package index has one build of it for Linux, for PyTorch with CUDA. Beside a CPU build of
PyTorch its library does not load, and its import fails for want of two operators, which it only describes. The tests
call no operator of torchvision. For tests alone: `pytest -p torchvision_operators`.
"""

from __future__ import annotations

import importlib
import sys

import torch

OPERATORS = torch.library.Library("torchvision", "FRAGMENT")

try:
    importlib.import_module("torchvision")
except RuntimeError as error:
    if "operator torchvision::nms does not exist" not in str(error):
        raise
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]
    for name in ("nms", "qnms"):
        OPERATORS.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    importlib.import_module("torchvision")
