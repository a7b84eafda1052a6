"""Generate the table of methods and the headers of the method pages.

    python scripts/document_methods.py --check     # is everything up to date?
    python scripts/document_methods.py --write     # update what is not

Neither imports torch or PEFT. Which architectures work is read from `capabilities.json`, which `make probe` writes.
The pages' equations, advice and examples are written by hand below the generated header.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from generated import ROOT, replaced

from inlay.methods.capabilities import FILE, capabilities, quantised_share, share, trained_count
from inlay.methods.registry import Method, Writing, all_methods

TABLE = ("<!-- methods:begin -->", "<!-- methods:end -->")
HEADER = ("<!-- generated:begin -->", "<!-- generated:end -->")
# GitHub and the site show the picture of their theme.
PLACES = """## Where each acts

![Where each method acts in a transformer](../images/methods/places-transformer-light.png#gh-light-mode-only)
![Where each method acts in a transformer](../images/methods/places-transformer-dark.png#gh-dark-mode-only)

A block with the norms $N_1$ and $N_2$ computes $h = x + \\mathrm{Attention}(N_1(x))$, then
$y = h + \\mathrm{FeedForward}(N_2(h))$. Older encoders such as BERT put the norms behind the sums. Each method is drawn
where its default settings put it. Settings such as `layers` and `target_modules` move it.

![Where each method acts in a ResNet](../images/methods/places-resnet-light.png#gh-light-mode-only)
![Where each method acts in a ResNet](../images/methods/places-resnet-dark.png#gh-dark-mode-only)

The pictures are drawn by `make docs`: every method is attached to small models, and what it trains is looked up.
"""
SECTIONS = ("The equation", "When to use it", "Cost", "Example", "Fidelity")
SAVED = {"peft": "an adapter in PEFT's format", "head": "the head alone", "full": "a whole checkpoint"}
TASKS = {
    "classification": "classification",
    "token-classification": "token classification",
    "causal-lm": "language modelling",
    "sequence-to-sequence": "sequence to sequence",
    "question-answering": "extractive question answering",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--check", action="store_true", help="list what is out of date")
    action.add_argument("--write", action="store_true", help="bring it up to date")
    options = parser.parse_args(arguments)
    stale = [path for path, text in pages().items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    unprobed = [name for name in all_methods() if name not in capabilities()["methods"]]
    if options.check:
        for path in stale:
            print(f"{path.relative_to(ROOT)} is out of date: run python scripts/document_methods.py --write")
        for name in unprobed:
            print(f"{FILE} knows nothing of {name}: run make probe")
        return 1 if stale or unprobed else 0
    for path in stale:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(pages()[path], encoding="utf-8")
        print(path.relative_to(ROOT))
    return 0


def pages() -> dict[Path, str]:
    """Every file that has a generated part, as it should read."""
    found: dict[Path, str] = {}
    index = f"# The methods\n\n{TABLE[0]}\n{table('')}\n{TABLE[1]}\n\n{PLACES}"
    found[ROOT / "docs/methods/README.md"] = index
    for method in all_methods().values():
        path = ROOT / "docs/methods" / f"{method.name}.md"
        text = path.read_text(encoding="utf-8") if path.is_file() else _skeleton(method)
        found[path] = replaced(text, HEADER, header(method), path)
    return found


def table(links: str) -> str:
    """One row per method: what it trains, where it works, what it costs."""
    lines = [
        "| method | what it does | text | images | quantised bases | trained parameters (BERT-base) | saved as |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for method in all_methods().values():
        text, images = (share(method, modality) for modality in ("text", "image"))
        name = f"[`{method.name}`]({links}{method.name}.md)"
        lines.append(
            f"| {name} | {method.summary} | {text} | {images} | {quantised_share(method)} | "
            f"{trained_count(method)} | {SAVED[method.form]} |"
        )
    return "\n".join(lines)


def header(method: Method) -> str:
    """The facts of one method."""
    rate = f"{method.learning_rate:g} by default{_rates(method)}; search grid: "
    rate += ", ".join(f"{rate:g}" for rate in method.grid)
    facts = {
        "paper": method.paper,
        "config": f"`{_public(method)}`" if method.config else "none: it has no settings",
        "learning rate": rate,
        "equals the base model before training": "yes, exactly" if method.identity_at_start else "no",
        "mergeable": "yes" if method.mergeable else "no",
        "on quantised bases": quantised_share(method).replace("-", "no"),
        "saved as": SAVED[method.form],
        "trained parameters (BERT-base)": f"{trained_count(method)}, plus the new head"
        if method.form == "peft"
        else trained_count(method),
    }
    lines = [
        f"{method.summary}",
        "",
        "| | |",
        "| --- | --- |",
        *(f"| {key} | {value} |" for key, value in facts.items()),
    ]
    lines += [] if method.writing is None else _writing(method.writing)
    return "\n".join([*lines, "", "Supported architectures (tested automatically):", "", *_families(method)])


def _writing(writing: Writing) -> list[str]:
    """The defaults of tasks in which a language model writes, by its size, with where they are from."""
    said = ", ".join(f"`{name}={value}`" for name, value in writing.settings.items())
    told = f"Where a language model learns to write: {said} ({writing.source})"
    if not writing.sizes:
        return ["", f"{told}."]
    lines = [
        f"{told}, and by the size of the model",
        "",
        "| parameters | learning rate | epochs | epochs for few examples | source |",
        "| --- | --- | --- | --- | --- |",
    ]
    least = ""
    for size in writing.sizes:
        of = least if size.below is None else f"{least and least + ', '}below {size.below / 1e9:g}B"
        least = "" if size.below is None else f"from {size.below / 1e9:g}B"
        lines.append(f"| {of} | {size.learning_rate:g} | {size.epochs:g} | {size.few_epochs:g} | {size.source} |")
    return ["", *lines, ""]


def _rates(method: Method) -> str:
    return "".join(f", {rate:g} on {kind} models" for kind, rate in method.rates.items())


def _families(method: Method) -> list[str]:
    known = capabilities()
    by_family = known["methods"].get(method.name, {})
    lines = []
    for task, title in TASKS.items():
        probed = [family for family, tasks in known["tasks"].items() if task in tasks]
        works = [family for family in probed if task in by_family.get(family, ())]
        lacking = [family for family in probed if family not in works]
        text = ", ".join(works) if works else "none"
        lines.append(f"- {title}: {'all' if not lacking else text}" + _not(works, lacking))
    return lines


def _not(works: list[str], lacking: list[str]) -> str:
    return f"; not {', '.join(lacking)}" if works and lacking else ""


def _public(method: Method) -> str:
    module, _, name = (method.config or "").partition(":")
    return f"inlay.{name}" if method.tuner else f"{module}.{name}"


def _skeleton(method: Method) -> str:
    return "\n\n".join([f"# {method.name}", *HEADER, *(f"## {section}" for section in SECTIONS)]) + "\n"


if __name__ == "__main__":
    sys.exit(main())
