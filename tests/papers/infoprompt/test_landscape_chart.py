"""The picture of `inlay explain landscape`: a path's own losses are in words, as the surface's scale has others."""

from __future__ import annotations

from inlay.papers.infoprompt.explain import charts
from inlay.papers.infoprompt.explain.landscape import Landscape, Path2D
from inlay.records.spec import Spec


def test_the_losses_of_a_path_are_written_at_its_ends() -> None:
    table = [[3.0, 3.5], [2.0, 2.5]]
    paths = [
        Path2D("gamma = 0.05", (0, 1), ((0.1, 0.1), (0.5, 0.5)), (0.679, 0.001), (4.0, 0.25)),
        Path2D("gamma = 0", (0, 1), ((0.1, 0.1), (0.4, 0.2)), (0.679, 0.002)),
    ]
    values = {"task": table, "representation": table}
    spec = Spec(model="a", task="rte", method="infoprompt")
    figure = charts.landscape(Landscape(spec, [0.0, 1.0], [0.0, 1.0], values, paths, 20, (0.1, 0.1)))
    shown = {axes.get_title(loc="left").split()[0]: axes for axes in figure.axes if axes.get_title(loc="left")}
    assert [text.get_text() for text in shown["task"].get_legend().get_texts()] == [
        "gamma = 0.05, 1 steps: loss from 0.679 (star) to 0.001 (dot)",
        "gamma = 0, 1 steps: loss from 0.679 (star) to 0.002 (dot)",
    ]
    assert [text.get_text() for text in shown["representation"].get_legend().get_texts()] == [
        "gamma = 0.05, 1 steps: loss from 4 (star) to 0.25 (dot)",
        "gamma = 0, 1 steps",
    ]
    for name, fixed in (("task", "class vectors"), ("representation", "critic")):
        assert f"surface: by the {fixed} after the last step of gamma = 0.05" in shown[name].get_title(loc="left")
