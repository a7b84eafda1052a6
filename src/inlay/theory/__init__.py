"""What the papers prove, as computations that can be checked: one package a paper, in plain torch and float64."""
