"""Charts of runs and explanations, each drawn from its numbers alone."""
