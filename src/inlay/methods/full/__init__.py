"""Full fine-tuning: train every parameter."""

from inlay.methods.registry import Method

METHOD = Method(
    name="full",
    summary="Trains every parameter; saves a whole checkpoint.",
    family="whole model",
    paper="Howard and Ruder, ACL 2018, https://arxiv.org/abs/1801.06146",
    form="full",
    learning_rate=5e-5,
    grid=(1e-5, 3e-5, 1e-4, 3e-4, 1e-3),
)
