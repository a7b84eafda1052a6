"""The verdicts that the pages show: none rests on one seed, a cut-short run or a toy; and the pages are up to date."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from inlay.papers.reproduce import catalogue
from inlay.papers.reproduce.latest import last_verdicts, latest
from inlay.papers.reproduce.recipe import FAILS, HOLDS, PRINTED, UNJUDGED, Recipe, Verdict
from inlay.papers.reproduce.results import Results

ROOT = Path(__file__).parents[3]
TOYS = [f"table-{item}" for item in ("1", "5", "a2", "a3", "a4", "a6", "a8")]
TOYS += [f"figure-{item}" for item in ("6", "7", "a1", "a2", "a3")]


def of(name: str) -> tuple[Recipe, list[Verdict]]:
    recipe = catalogue.recipes()[name]
    found = last_verdicts(recipe)
    assert found is not None
    return recipe, found


def test_toys_judge_nothing_but_counts() -> None:
    for item in TOYS:
        recipe, found = of(f"activation-prompts/{item}")
        for claim, verdict in zip(recipe.claims, found, strict=True):
            assert claim.where == PRINTED or verdict.kind not in (HOLDS, FAILS), (item, claim.text)
        assert any("demonstration" in verdict.unjudged for verdict in found), item


def test_figures_of_in_context_learning_wait_for_their_length_and_for_seeds() -> None:
    recipe, found = of("icl/figure-4")
    for claim, verdict in zip(recipe.claims[:6], found, strict=False):
        assert str(verdict) == "200 of 600 epochs, one seed: not judged", claim.text
    assert found[-1].kind == FAILS  # exact: no training falls below the infimum
    for item in ("figure-2", "figure-5"):
        assert {verdict.kind for verdict in of(f"icl/{item}")[1]} == {UNJUDGED}
    assert {verdict.kind for verdict in of("icl/theorem-2")[1]} == {HOLDS}  # from three starts


def test_no_verdict_of_any_paper_rests_on_one_seed() -> None:
    """Without all that has one seed each verdict that is left stands as it is told."""
    for recipe in catalogue.recipes().values():
        found, verdicts = latest(recipe.name), last_verdicts(recipe)
        assert found is not None
        assert verdicts is not None
        results = Results.from_json(found["ours"])
        lone = {claim.claim for claim in results.stated if claim.seeds == 1}
        for claim, verdict in zip(recipe.claims, verdicts, strict=True):
            if verdict.kind in (HOLDS, FAILS):
                assert "one seed" not in verdict.measured, claim.text
                assert not any(text.startswith(claim.text) for text in lone), claim.text


def test_the_pages_are_up_to_date_and_the_short_one_is_short() -> None:
    script = ROOT / "scripts" / "document_fidelity.py"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    page = (ROOT / "docs" / "verdicts.md").read_text(encoding="utf-8")
    assert len(page.splitlines()) <= 100
    assert page.count("\n## ") == len({recipe.paper for recipe in catalogue.recipes().values()})
