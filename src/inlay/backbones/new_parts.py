"""What loading did not find in the checkpoint, and the fingerprint of what it did.

The new head is wanted, holes in the backbone are not. Transformers initialises every missing weight and goes on. Here a
weight that the frozen part needs and the checkpoint lacks is an error, and the new part is drawn from the run's own
seed, whatever the state of the global generator. By its fingerprint an adapter is never set into a base that it was not
made for.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from inlay.errors import InlayError

# A pooler is trained anew where the checkpoint has none (masked language models have none).
_POOLER = re.compile(r"(^|\.)pooler(\.|$)")
# Computed from the config, or used only in pretraining: nothing is lost where the checkpoint leaves them out.
_HARMLESS = re.compile(
    r"(^|[._])(position_ids|token_type_ids|num_batches_tracked|relative_position_index|relative_coords_table|inv_freq|"
    r"mask_token|masked_bias|final_logits_bias)$"
)

DIGESTS = "_inlay_digests"
"""An attribute of a model that was quantised or rounded when it was loaded: what its full weights hash to, by name."""
PIECE = 2**20  # numbers that are converted at once to be hashed
_OF_QUANTISED = ("SCB", "weight_format")  # what a quantised layer has beside its weight


def may_be_new(name: str) -> bool:
    """Whether this is a pooler's, which some checkpoints lack."""
    return _POOLER.search(name) is not None


def trunk(model: nn.Module) -> str:
    """The name of the child that is the pretrained backbone: the largest one where the class does not say."""
    prefix = getattr(model, "base_model_prefix", "")
    if prefix and isinstance(getattr(model, prefix, None), nn.Module):
        return prefix
    return max(model.named_children(), key=lambda child: sum(p.numel() for p in child[1].parameters()))[0]


def new_modules(
    model: nn.Module, report: Mapping[str, Any], name: str, language: bool, bare: bool = False
) -> list[str]:
    """The modules that loading drew anew, each as high up as all of it is new; an error for holes in the backbone.

    `language` says that the model predicts tokens: then the head is its output embedding, otherwise all around the
    backbone; `bare` that there is none.
    """
    mismatched = {key: (tuple(found), tuple(wanted)) for key, found, wanted in report["mismatched_keys"]}
    missing = {key for key in report["missing_keys"] if not _HARMLESS.search(key)} | set(mismatched)
    missing &= model.state_dict().keys()  # a pooler that nobody reads was taken out
    head = () if bare else _head(model, language)
    holes = sorted(key for key in missing if not _POOLER.search(key) and not key.startswith(head))
    if holes:
        key = holes[0]
        shapes = f": {mismatched[key][0]} in the file, {mismatched[key][1]} by config.json" if key in mismatched else ""
        total = sum(1 for weight in model.state_dict() if not weight.startswith(head))
        raise InlayError(
            f"{name!r} does not hold {len(holes)} of the {total} weights that {type(model).__name__} needs in its "
            f"frozen part (such as {key}{shapes}). The checkpoint is incomplete, or its config.json describes "
            "another model."
        )
    return collapse(model, missing)


def collapse(model: nn.Module, keys: Iterable[str]) -> list[str]:
    """The modules that own these weights; a parent in place of its children where everything in it is among them."""
    wanted = set(keys)
    every = [key for key in model.state_dict() if not _HARMLESS.search(key)]
    names = set()
    for key in wanted:
        owner = key.rpartition(".")[0]
        while (parent := owner.rpartition(".")[0]) and all(k in wanted for k in every if k.startswith(f"{parent}.")):
            owner = parent
        names.add(owner)
    order = {name: index for index, (name, _) in enumerate(model.named_modules())}
    return sorted(names, key=order.__getitem__)


def output_layer(model: nn.Module, num_labels: int) -> str | None:
    """The last layer of a classifier's head that gives one number a label."""
    head, found = _head(model, language=False), None
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, nn.Parameter) and f"{name}.".startswith(head) and weight.dim() == 2:
            found = name if len(weight) == num_labels else found
    return found


def _head(model: Any, language: bool) -> tuple[str, ...]:
    """How the names of the weights in the head begin. timm keeps its classifier inside the backbone."""
    if language or hasattr(model, "timm_model"):
        layer = model.get_output_embeddings() if language else model.timm_model.get_classifier()
        return tuple(f"{name}." for name, module in model.named_modules() if module is layer)
    backbone = trunk(model)
    return tuple(f"{name}." for name, _ in model.named_children() if name != backbone)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """What is drawn inside follows from `seed` alone, and the global generator is as before at the end.

    The CPU's generator only: torch.manual_seed would also reseed the accelerators, whose state is not ours to change.
    """
    generator = torch.default_generator
    state = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(state)


@torch.no_grad()
def draw(model: Any, names: Sequence[str], seed: int) -> None:
    """Initialise the modules called `names` by the model's own rule, from `seed` alone; nothing else is touched."""
    if not names:
        return
    fresh = [module for name in names for module in model.get_submodule(name).modules()]
    for module in fresh:
        module.__dict__.pop("_is_hf_initialized", None)
        for parameter in module.parameters(recurse=False):
            parameter.__dict__.pop("_is_hf_initialized", None)
            parameter.fill_(float("nan"))
    # On the CPU, wherever the model is: `seeded` has no other generator.
    device = next(parameter.device for module in fresh for parameter in module.parameters())
    for name in names:
        model.get_submodule(name).to("cpu")
    with seeded(seed):
        model.initialize_weights()
        for module in fresh:
            # Transformers has no rule for a few layers; torch's own is the one they were built with.
            if any(parameter.isnan().any() for parameter in module.parameters(recurse=False)):
                module.reset_parameters()
    for name in names:
        model.get_submodule(name).to(device)


def fingerprint(model: nn.Module, new: Collection[str] = (), dtype: torch.dtype | None = None) -> str:
    """SHA-256 over name, shape, dtype and bytes of every weight and saved buffer outside the modules called `new`.

    The same on every device and however the checkpoint was cut into files; a weight that is tied to another counts
    once. It is a property of the weights in memory: the same checkpoint in another dtype has another fingerprint. Only
    of a model that was quantised when it was loaded it is that of the full weights, in float32. With `dtype` it is the
    one that these weights would have in it.
    """
    outside = tuple(f"{name}." for name in new)
    known: Mapping[str, bytes] = getattr(model, DIGESTS, {})
    inside = tuple(f"{name}." for name in known)  # scales and tables of a quantised weight
    weights: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, weight in sorted(model.state_dict(keep_vars=True).items()):
        if known and (name.startswith(inside) or name.rpartition(".")[2] in _OF_QUANTISED):
            continue
        if isinstance(weight, Tensor) and not name.startswith(outside) and id(weight) not in seen:
            seen.add(id(weight))
            weights[name] = weight
    total = hashlib.sha256()
    # hashlib lets go of the interpreter lock, so the tensors are hashed side by side.
    with ThreadPoolExecutor() as pool:
        for found in pool.map(lambda item: known.get(item[0]) or digest(item[0], item[1], dtype), weights.items()):
            total.update(found)
    return total.hexdigest()


def digest(name: str, weight: Tensor, dtype: torch.dtype | None = None) -> bytes:
    """A tensor's name, shape and type, and SHA-256 of its bytes, read in place where it lies in memory in order; with
    `dtype`, as if a weight of another precision were converted to it, of which only a piece is in memory."""
    flat = weight.detach().cpu().contiguous().reshape(-1)
    kept = flat.dtype if dtype is None or not flat.is_floating_point() else dtype
    found = hashlib.sha256()
    for piece in flat.split(len(flat) if kept == flat.dtype else PIECE):
        found.update(piece.to(kept).view(torch.uint8).numpy().data)
    return f"{name} {tuple(weight.shape)} {kept} ".encode() + found.digest()
