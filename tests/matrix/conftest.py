"""All properties of a case one after another, so that what they share is made once."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def case(item: pytest.Item) -> str:
        return str(item.callspec.params.get("case", "")) if hasattr(item, "callspec") else ""

    order: dict[str, int] = {}
    places = [place for place, item in enumerate(items) if item.path == HERE / "test_matrix.py"]
    chosen = [items[place] for place in places]
    for item in chosen:
        order.setdefault(case(item), len(order))
    for place, item in zip(places, sorted(chosen, key=lambda item: order[case(item)]), strict=True):
        items[place] = item
