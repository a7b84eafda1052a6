"""The tables, figures and theorems of the paper, one recipe each."""
