"""Where each method acts in a transformer block and in a ResNet: the drawings of docs/methods/README.md.

    python scripts/document_places.py --write     # attach every method, note where it acts, draw
    python scripts/document_places.py --check     # is docs/data/places.json what the methods do?

Nothing is written down by hand: every method of the registry is put into tiny models of tests/zoo.py with its default
settings, and the module that each trained parameter belongs to is looked up in `anatomy`. Heads are left out, because
every method trains the new head. Texts and images count as one transformer.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from generated import ROOT

sys.path.insert(0, str(ROOT / "tests"))

from torch import nn

from inlay.anatomy import Anatomy, Block, anatomy
from inlay.methods.attach import attach
from inlay.methods.capabilities import capabilities
from inlay.methods.protocol import hooks_of
from inlay.methods.registry import Method, all_methods
from zoo import tiny

DATA, IMAGES = ROOT / "docs" / "data" / "places.json", ROOT / "docs" / "images" / "methods"
KINDS = {"transformer": ("bert", "vit"), "resnet": ("resnet",)}
PIXELS, STEM, FIRST, ENTRY, SOFTMAX = "the pixels", "embedding", "the first tokens", "what enters a block", "attention"
WRAPPER = ("base_model.model.", "base_model.")
# In the order in which a forward pass goes through them; transformers as pre-norm, which most are today.
ORDER = {
    "transformer": [
        *(PIXELS, STEM, FIRST, ENTRY, "norm 1", "query", "key", "value", SOFTMAX, "output"),
        *("norm 2", "up", "down", "final norm"),
    ],
    "resnet": [
        *(PIXELS, STEM, ENTRY, "convolution 1", "norm 1", "convolution 2", "norm 2", "convolution 3", "norm 3"),
        *("shortcut convolution", "shortcut norm"),
    ],
}


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--check", action="store_true", help="say whether it is out of date")
    action.add_argument("--write", action="store_true", help="bring it up to date")
    options = parser.parse_args(arguments)
    found = json.dumps(places(), indent=1) + "\n"
    if options.check:
        if not DATA.is_file() or DATA.read_text(encoding="utf-8") != found:
            print("docs/data/places.json is out of date: run python scripts/document_places.py --write")
            return 1
        return 0
    from draw_places import draw

    DATA.write_text(found, encoding="utf-8")
    draw(json.loads(found), {name for name, method in all_methods().items() if method.tuner is None}, IMAGES)
    return 0


def places() -> dict[str, dict[str, list[str]]]:
    """For a transformer and a ResNet: the methods at every place, in the order of the registry."""
    found: dict[str, dict[str, list[str]]] = {}
    for kind, families in KINDS.items():
        at: dict[str, list[str]] = {place: [] for place in ORDER[kind]}
        for method in all_methods().values():
            if method.form != "peft":
                continue
            acts = {place for family in families for place in _acts(method, family)}
            if unknown := acts - set(at):
                raise SystemExit(f"{method.name} acts at {', '.join(unknown)}, which ORDER[{kind!r}] does not have.")
            for place in acts:
                at[place].append(method.name)
        found[kind] = {place: names for place, names in at.items() if names}
    return found


def _acts(method: Method, family: str) -> set[str]:
    if "classification" not in capabilities()["methods"].get(method.name, {}).get(family, ()):
        return set()
    base, _ = tiny(family, "classification")
    plain = {name for name, _ in base.named_modules() if name}  # before anything is attached
    parts = _parts(anatomy(base))
    adapted: Any = attach(base, method)
    hooks = hooks_of(adapted.peft_config["default"])
    if hooks.num_virtual_tokens and method.tuner is None:
        return {FIRST} if hooks.prepends_tokens else {SOFTMAX}
    hosts = set(_hosts(adapted, plain)) & set(parts)  # the rest is a pooler
    acts = {parts[host] for host in hosts}
    blocks = {host for host in hosts if parts[host] == ENTRY}
    if blocks == {next(name for name, place in parts.items() if place == ENTRY)} and len(hosts) == 1:
        acts = {FIRST}  # before the first block alone
    return acts


def _hosts(adapted: nn.Module, known: set[str]) -> Iterator[str]:
    """The module of the plain model to which each trained parameter belongs."""
    for name, parameter in adapted.named_parameters():
        if not parameter.requires_grad or "modules_to_save" in name:
            continue
        plain = name
        for wrapper in WRAPPER:
            plain = plain.removeprefix(wrapper)
        steps = plain.split(".")
        longest = (".".join(steps[:end]) for end in range(len(steps), 0, -1))
        yield next(host for host in longest if host in known)


def _parts(found: Anatomy) -> dict[str, str]:
    """The places of a model's modules, by their names."""
    parts = {found.backbone.name: FIRST}
    parts |= {part.name: STEM for part in found.norms if not any(_inside(part.name, b) for b in found.blocks)}
    if found.final_norm is not None:
        parts[found.final_norm.name] = "final norm"
    parts[found.stem.name] = STEM
    for part in found.stem_parts:
        parts[part.name] = STEM
        # On the stem as a whole acts what changes the pixels; inside of it, what changes the embedding.
        parts |= {f"{part.name}.{name}": STEM for name, _ in part.module.named_modules() if name}
    if found.modality == "image":
        outermost = min((part.name for part in (found.stem, *found.stem_parts)), key=len)
        parts[outermost] = PIXELS
    for block in found.blocks:
        parts |= _block(block)
    return parts


def _block(block: Block) -> dict[str, str]:
    parts = {block.name: ENTRY}
    if block.attention is not None:
        attention = block.attention
        parts[attention.name] = SOFTMAX
        for place in ("query", "key", "value", "output"):
            parts[getattr(attention, place).name] = place
        parts |= {part.name: place for part, place in zip(block.feed_forward, ("up", "down"), strict=True)}
        parts |= {part.name: f"norm {number}" for number, part in enumerate(block.norms, 1)}
        return parts
    for word, group in (("convolution", block.feed_forward), ("norm", block.norms)):
        straight = [part for part in group if "shortcut" not in part.name]
        parts |= {part.name: f"shortcut {word}" for part in group if "shortcut" in part.name}
        parts |= {part.name: f"{word} {number}" for number, part in enumerate(straight, 1)}
    return parts


def _inside(name: str, block: Block) -> bool:
    return name.startswith(f"{block.name}.")


if __name__ == "__main__":
    sys.exit(main())
