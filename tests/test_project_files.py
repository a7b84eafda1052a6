"""The files around the code agree with it: versions, pins, the citation, the workflows."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import inlay
from inlay.papers.reproduce import catalogue

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
# What the Citation File Format 1.2.0 knows, as far as it is used here.
KEYS = {"cff-version", "title", "message", "type", "authors", "license", "version", "date-released", "references"}
REFERENCE = {"type", "title", "authors", "year", "url", "doi", "conference", "journal", "notes"}
PERSON = {"family-names", "given-names", "name-particle", "name-suffix", "orcid", "affiliation", "alias", "email"}
WORKS = {"article", "conference-paper", "book", "report", "software", "thesis", "unpublished"}


def test_one_version_with_its_date() -> None:
    assert PROJECT["version"] == inlay.__version__
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    unreleased, latest, *_ = re.findall(r"^## (.+)$", changes, flags=re.MULTILINE)
    assert unreleased == "Unreleased"
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert latest == f"{inlay.__version__} - {cited['date-released']}"


def test_the_citation_is_a_valid_one_of_this_version_and_of_every_paper() -> None:
    cited: dict[str, Any] = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert cited["cff-version"] == "1.2.0"
    assert set(cited) <= KEYS
    assert {"title", "message", "authors"} <= set(cited)
    assert cited["version"] == inlay.__version__
    assert cited["license"] == PROJECT["license"]
    for work in (cited, *cited["references"]):
        assert work["title"]
        assert work["authors"]
        for author in work["authors"]:
            assert set(author) == {"name"} or ({"family-names"} <= set(author) <= PERSON), author
    for work in cited["references"]:
        assert set(work) <= REFERENCE
        assert work["type"] in WORKS
    titles = {work["title"] for work in cited["references"]}
    assert titles == {catalogue.title(paper).partition(" (")[0] for paper in catalogue.papers()}


def test_every_pin_is_in_its_range() -> None:
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").split())
    pins = {canonicalize_name(name): version for name, version in pins.items()}
    wanted = [*PROJECT["dependencies"], *(each for some in PROJECT["optional-dependencies"].values() for each in some)]
    for requirement in map(Requirement, wanted):
        name = canonicalize_name(requirement.name)
        assert name in pins, f"{name} has no pin in constraints.txt"
        assert requirement.specifier.contains(pins[name]), f"{name}: {pins[name]} is not {requirement.specifier}"


@pytest.mark.parametrize("path", sorted((ROOT / ".github").rglob("*.yml")), ids=lambda path: path.name)
def test_a_workflow_names_what_is_there(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert yaml.safe_load(text)
    made = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    for target in re.findall(r"run: make ([a-z-]+)", text):
        assert target in made
    for file in re.findall(r"(?:scripts|benchmarks|tests|\.ci)/[a-z_./]*[a-z]", text):
        assert (ROOT / file).exists(), f"{path.name} names {file}"
    pythons = re.findall(r"python: \[(.*)\]", text)
    for versions in pythons:
        assert PROJECT["requires-python"].removeprefix(">=") in versions
