"""In-context learning with representations: a transformer that becomes ridge regression, computed.

`problem`: the dictionary, its representation, the tasks, and the labels' moments, which are all that the losses need.
`model`: the one-layer transformer (8), its population loss, gradient and infimum in closed form.
`descent`: gradient descent with two step sizes (10), and section 4's Adam, on the population or on samples.
`bounds`: Theorems 1 and 2 with every constant, and their assumptions on an instance.
`ridge`: the regressions (20) and (25), `y*`, `y_best` and the matrix A.
`proposition`: Proposition 1, and what breaks it.
"""

from __future__ import annotations

from inlay.papers.icl.theory import ridge
from inlay.papers.icl.theory.bounds import BoundConstants, assumptions, constants, needed_steps, zeta_0
from inlay.papers.icl.theory.descent import Batches, Trace, descend, held_out, train, usable_steps
from inlay.papers.icl.theory.model import OneLayer, quadratic
from inlay.papers.icl.theory.problem import (
    IN_DOMAIN,
    OUT_OF_DOMAIN,
    DrawnPrompts,
    InContextProblem,
    Moments,
    TaskDistribution,
)

__all__ = [
    "IN_DOMAIN",
    "OUT_OF_DOMAIN",
    "Batches",
    "BoundConstants",
    "DrawnPrompts",
    "InContextProblem",
    "Moments",
    "OneLayer",
    "TaskDistribution",
    "Trace",
    "assumptions",
    "constants",
    "descend",
    "held_out",
    "needed_steps",
    "quadratic",
    "ridge",
    "train",
    "usable_steps",
    "zeta_0",
]
