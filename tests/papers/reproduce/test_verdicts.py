"""The verdicts that the pages show: none rests on one seed, a cut-short run or a toy; and the pages are up to date."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from inlay.papers.reproduce import catalogue
from inlay.papers.reproduce.latest import last_verdicts, latest
from inlay.papers.reproduce.recipe import FAILS, HOLDS, PRINTED, UNJUDGED, UNTESTED, Recipe, Verdict
from inlay.papers.reproduce.results import MEAN_OF, Results

ROOT = Path(__file__).parents[3]
TOYS = [f"table-{item}" for item in ("1", "5")]
TOYS += [f"figure-{item}" for item in ("6", "7", "a1", "a2", "a3")]
READ = [f"table-{item}" for item in ("4", "a3", "a4", "a5", "a6", "a7", "a8")]  # kept runs stand in for their toys


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


def test_numbers_of_kept_runs_would_judge_nothing_had_a_toy_made_them() -> None:
    for item in READ:
        recipe, found = of(f"activation-prompts/{item}")
        kept = latest(recipe.name)
        assert kept is not None
        accuracy = {
            claim.text for claim, verdict in zip(recipe.claims, found, strict=True) if MEAN_OF in verdict.measured
        }
        assert accuracy, item
        made = recipe.judged(Results.from_json(kept["ours"]), "here", read=False)
        for claim, verdict in zip(recipe.claims, made, strict=True):
            if claim.text in accuracy:
                assert verdict.kind == UNJUDGED, (item, claim.text)
                assert "demonstration" in verdict.unjudged, (item, claim.text)


def test_a_learning_rate_of_a_tie_at_an_end_of_its_grid_judges_nothing() -> None:
    recipe, found = of("activation-prompts/table-a3")
    by_claim = dict(zip((claim.text for claim in recipe.claims), found, strict=True))
    told = by_claim["An added prompt is above concatenated ones"]
    assert str(told) == "the learning rate of AP-CONCATE is one of a tie and at an end of those tried: not judged"
    assert by_claim["An added prompt is above a multiplied one"].kind != UNJUDGED
    recipe, found = of("activation-prompts/table-4")
    told = dict(zip((claim.text for claim in recipe.claims), found, strict=True))["AdaptFormer is the most accurate"]
    assert "E2VPT" in told.unjudged


def test_a_mean_of_four_sets_judges_no_claim_about_the_papers_groups() -> None:
    assert {verdict.kind for verdict in of("activation-prompts/table-a2")[1][:4]} == {UNTESTED}
    assert of("activation-prompts/table-4")[1][0].kind == UNTESTED


def test_better_than_as_well_is_as_well() -> None:
    assert of("activation-prompts/table-a6")[1][0].kind == HOLDS


def test_figures_of_in_context_learning_wait_for_their_length_and_for_seeds() -> None:
    def kinds(item: str, part: str = "") -> list[tuple[str, str]]:
        recipe, found = of(f"icl/{item}")
        return [(v.kind, str(v)) for claim, v in zip(recipe.claims, found, strict=True) if part in claim.text]

    cut = [*kinds("figure-2", "four layers"), *kinds("figure-5")]
    assert len(cut) == 7
    for kind, told in cut:
        assert kind == UNJUDGED
        assert "one seed" in told
        assert " of " in told  # how much of the printed length was run
    # Figures 2(a) and 4 have three starts at the printed length.
    for item, part in (("figure-2", "one layer"), ("figure-4", "")):
        assert UNJUDGED not in {kind for kind, _ in kinds(item, part)}
        found = latest(f"icl/{item}")
        assert found is not None
        whole = [claim for claim in found["ours"]["stated"] if not claim["short"]]
        assert {claim["seeds"] for claim in whole} == {3}
    assert kinds("figure-4")[-1][0] == FAILS  # exact: no training falls below the infimum
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
