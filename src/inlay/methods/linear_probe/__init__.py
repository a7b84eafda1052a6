"""The linear probe: train a new head on the frozen model's features."""

from inlay.methods.registry import Method

METHOD = Method(
    name="linear-probe",
    summary="Trains the new head alone, on the frozen model's features.",
    family="head",
    paper="Alain and Bengio, 2016, https://arxiv.org/abs/1610.01644",
    form="head",
    auto=("text", "image"),
    learning_rate=1e-2,
    grid=(1e-3, 3e-3, 1e-2, 3e-2),
)
