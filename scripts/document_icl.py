"""The numbers in docs/icl.md, from what the paper keeps of `inlay lab icl`.

    python scripts/document_icl.py

Beside each picture: the command, the machine and the claims; above all, which of them hold. The words around are
people's. `inlay lab icl --figure all --redraw --out src/inlay/papers/icl/kept/lab` reads the claims and draws the
pictures again first, where the code has changed since; `python scripts/take_lab.py` then brings the pictures home.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from generated import ROOT
from page_tables import fill

from inlay.papers.experiment_files import read
from inlay.papers.findings import Finding, MeasuredClaim
from inlay.papers.reproduce import kept

PAGE, LAB = ROOT / "docs" / "icl.md", kept.path("icl", "lab")
FOUND = (
    "icl-theorem-1",
    "icl-theorem-2",
    "icl-proposition-1",
    "icl-section-3-3",
    "icl-figure-2a",
    "icl-figure-2b",
    "icl-figure-3",
    "icl-figure-4",
    "icl-figure-5",
    "icl-run",
    "icl-language",
)
# What the paper says, the experiment that tests it, how its claims begin, and a remark that no number changes.
SAID = (
    ("Theorem 1: the gap is below (18) at every step", "icl-theorem-1", "(18): the gap", "at N = 2, 3, 4"),
    ("(18) says something at the printed sizes", "icl-theorem-1", "(18) says something", ""),
    ("a larger H makes the guaranteed rate slower", "icl-theorem-1", "a larger H", "`zeta_0` grows with H too"),
    ("Theorem 2: after T steps the outputs are y* to within epsilon", "icl-theorem-2", "after T", ""),
    ("Proposition 1: full rank with H >= N heads", "icl-proposition-1", "H >= N", "tokens of norm 1"),
    ("the same with Gaussian tokens", "icl-proposition-1", "so too", "in floating point"),
    ("never with fewer heads", "icl-proposition-1", "H < N", ""),
    ("never with a token twice", "icl-proposition-1", "a token twice", ""),
    ("Section 3.3: without noise the label is <y, Z^+ Zhat_k>", "icl-section-3-3", "without noise", "with N >= m"),
    ("y* is <y, A_k>", "icl-section-3-3", "y* is", ""),
    ("one head cannot reach the least loss", "icl-section-3-3", "one head cannot", "an exact lower bound"),
    ("trained, one head stays above that bound", "icl-section-3-3", "trained, one head", ""),
    ("trained, N heads come below it", "icl-section-3-3", "trained, N", ""),
    ("Figure 2(a): three losses descend together", "icl-figure-2a", "the three curves", ""),
    ("the out-of-domain loss is above the in-domain one", "icl-figure-2a", "the out-of-domain", ""),
    ("the output converges to y*", "icl-figure-2a", "the output", ""),
    ("Figure 2(b): so too with four layers: together", "icl-figure-2b", "the three curves", ""),
    ("out-of-domain above in-domain", "icl-figure-2b", "the out-of-domain", ""),
    ("the output converges to y*", "icl-figure-2b", "the output", ""),
    ("Figure 3: the gap between y* and y_best is smallest at N = m", "icl-figure-3", "the gap", "by construction"),
    ("the closer N is to m, the better the prediction", "icl-figure-3", "the closer", "the error falls with N"),
    ("y_best is the best prediction one could hope for", "icl-figure-3", "y_best", "y* is better unless N = m"),
    ("Figure 4: with H < N the loss stops far from its minimum", "icl-figure-4", "H < N", ""),
    ("with H >= N it keeps descending", "icl-figure-4", "H >= N", ""),
    ("H = 400 is unstable and diverges", "icl-figure-4", "H = 400", ""),
    ("a large H is the least stable, at 100 times the learning rate", "icl-figure-4", "the largest H", ""),
    ("the loss falls to 0.001", "icl-figure-4", "the population loss", "its infimum is above that"),
    ("Figure 5: four layers need no large H", "icl-figure-5", "four layers", ""),
    ("in a fixed time a small H ends lowest", "icl-figure-5", "in ", ""),
    ("a larger H completes fewer steps", "icl-figure-5", "a larger H", ""),
    ("a large H is slower per step too", "icl-figure-5", "a large H", ""),
)


def written(text: str) -> str:
    """For a cell of a table: bars would end it, stars would slant what follows."""
    return text.replace("|", "\\|").replace("*", "\\*")


def holds(starts: Sequence[Finding], begins: str) -> str:
    """The verdicts on the claims that begin so: one word, or each with what tells the claims apart."""
    claims = [of for of in each_claim(starts) if of[0].claim.startswith(begins)]
    if not claims:
        raise SystemExit(f"{starts[0].name} has no claim that begins with {begins!r}: run it again")
    if len({verdict(of) for of in claims}) == 1:
        return verdict(claims[0])
    return "; ".join(f"{of[0].claim.rpartition('; ')[2].rpartition(': ')[2]}: {verdict(of)}" for of in claims)


def each_claim(starts: Sequence[Finding]) -> list[tuple[MeasuredClaim, ...]]:
    """Every claim, as the trainings from each start have it."""
    return list(zip(*(found.claims for found in starts), strict=True))


def verdict(of: Sequence[MeasuredClaim]) -> str:
    """What the starts say of a claim."""
    if len(of) == 1 or of[0].seeds is None:
        return str(of[0])
    said = [f"not judged: {claim.short}" if claim.short else claim.holds for claim in of]
    return f"{said[0]}, from {len(of)} starts" if len({*said}) == 1 else f"the starts differ: {', '.join(said)}"


def measured(of: Sequence[MeasuredClaim], seeds: Sequence[int]) -> str:
    """What each start gave."""
    if len(of) == 1:
        return of[0].measured
    return "; ".join(f"seed {seed}: {claim.measured}" for seed, claim in zip(seeds, of, strict=True))


def verdicts(kept: dict[str, list[Finding]]) -> list[str]:
    """The table above all."""
    lines = ["| the paper | holds here? |", "| --- | --- |"]
    for sentence, name, begins, remark in SAID:
        cell = holds(kept[name], begins) if name in kept else "not measured"
        lines.append(f"| {written(sentence)} | {cell}{f' ({written(remark)})' if remark and name in kept else ''} |")
    return lines


def block(starts: Sequence[Finding], facts: dict[str, Any]) -> list[str]:
    """A picture, how it was made, and its claims; the picture and the command are those of the first start."""
    found = starts[0]
    versions, settings = facts["versions"], found.facts
    threads = versions["threads"]
    machine = "one core of a CPU" if threads == 1 else f"{threads} cores of a CPU"
    if str(settings.get("device")).startswith("cuda"):
        machine = f"{versions['gpu']}, {settings['training seconds']:.0f} s of training"
    lines = [f"![{found.name}](images/lab/{found.name}/{found.name}.png)", ""]
    lines += [f"`{' '.join(facts['command'])}` (on {machine})", ""]
    lines += ["| claim | measured | holds? |", "| --- | --- | --- |"]
    seeds = kept.seeds(starts)
    return lines + [
        f"| {written(of[0].claim)} | {written(measured(of, seeds))} | {verdict(of)} |" for of in each_claim(starts)
    ]


def left(found: Finding) -> list[str]:
    """Figure 4: what is left of the gap, by tokens and H."""
    heads = sorted({row[2] for row in found.rows if isinstance(row[2], int)})
    lines = [
        "| gap left of its start | " + " | ".join(f"H = {H}" for H in heads) + " |",
        "| --- |" + " ---: |" * len(heads),
    ]
    for tokens, words in (("Gaussian", "Gaussian tokens, as printed"), ("norm 1", "tokens of norm 1")):
        cells = []
        for H in heads:
            gaps = [row[6] for row in found.rows if row[:3] == (tokens, found.facts["rate"], H)]
            cells.append(f"{gaps[-1] / gaps[0]:.2g}")  # type: ignore[operator]
        lines.append(f"| {words} | " + " | ".join(cells) + " |")
    return [
        *lines,
        "",
        f"After {found.facts['steps'] / found.facts['steps in an epoch']:.0f} epochs; seed 0.",
    ]


LANGUAGE = {
    "tasks": "tasks",
    "N": "N",
    "error, model": "error of the model",
    "error, ridge m tau": "of ridge, `m tau`",
    "matched strength": "matching strength",
    "model from matched ridge": "model from that ridge",
    "model from matched kernel average": "from a matched kernel average",
    "model from the mean of the labels": "from the labels' mean",
    "model from the nearest label": "from the nearest label",
}


def language(found: Finding, sizes: Sequence[int] = (2, 8, 32)) -> list[str]:
    """The answers of a language model beside the rules that could explain them."""
    lines = ["| " + " | ".join(LANGUAGE.values()) + " |", "| --- |" + " ---: |" * (len(LANGUAGE) - 1)]
    for row in found.rows:
        of = dict(zip(found.columns, row, strict=True))
        if of["N"] in sizes:
            cells = [of[name] for name in LANGUAGE]
            lines.append(
                "| " + " | ".join(f"{cell:.1f}" if isinstance(cell, float) else str(cell) for cell in cells) + " |"
            )
    return lines


def main() -> None:
    folders = [LAB / name for name in FOUND if (LAB / name).is_dir()]
    facts = {folder.name: read(folder)[1] for folder in folders}
    found = {name: [one for one, _ in kept.experiments("icl", name)] for name in facts}
    absent = ["Not measured yet."]
    parts = {name: block(found[name], facts[name]) if name in found else absent for name in FOUND}
    parts["icl verdicts"] = verdicts(found)
    parts["icl-figure-4 gaps"] = left(found["icl-figure-4"][0])
    parts["icl-language table"] = language(found["icl-language"][0])
    fill(PAGE, parts)


if __name__ == "__main__":
    main()
