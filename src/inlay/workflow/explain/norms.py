"""How large a trained prompt became: its norm, read off a finished run."""

from __future__ import annotations

from inlay.methods import registry
from inlay.methods.folder import CONFIG, WEIGHTS, read_json
from inlay.records.store import Run


def norm_of(run: Run) -> tuple[float, float] | None:
    """The Euclidean norm of a run's trained prompt, and its root mean square over positions; None without a prompt.

    With `delta_p` the prompt at position p of P: `|delta| = sqrt(sum_p |delta_p|^2)` and `|delta| / sqrt(P)`.
    """
    from safetensors import safe_open

    kept = registry.get(run.spec.method).prompt_parameter
    if kept is None:
        return None
    config = read_json(run.adapter / CONFIG["peft"])
    framed = config.get("kind") in ("pad", "resize-concat")
    total, positions = 0.0, 0
    with safe_open(run.adapter / WEIGHTS["peft"], framework="pt") as tensors:
        for key in tensors.keys():  # noqa: SIM118 - no mapping
            if kept in key:
                prompt = tensors.get_tensor(key).double()
                total += float(prompt.square().sum())
                positions += positions_of(tuple(prompt.shape), framed=framed)
    return (total**0.5, (total / positions) ** 0.5) if positions else None


def positions_of(shape: tuple[int, ...], *, framed: bool = False) -> int:
    """How many positions a prompt has: channels x height x width, tokens x width, one vector, or a frame's pixels."""
    if len(shape) == 3:
        return shape[1] * shape[2]
    if len(shape) == 2:
        return shape[1] if framed else shape[0]
    return 1
