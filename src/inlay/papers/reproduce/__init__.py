"""The papers' tables, figures and theorems, made again: one recipe each, with the claim it must show.

`recipe.py` says what a recipe is and how to add one; `results.py` is the table that a paper prints and a run gives;
`predicates.py` decides claims on both; `bench.py` is what a recipe works with, `standins.py` what it works on at
`smoke`; `perform.py` carries it out and keeps the result; `scripts/document_fidelity.py` writes the
generated part of docs/fidelity.md. The recipes are in one folder per paper.
"""
