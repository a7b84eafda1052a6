"""Charts of NTK-Attention."""
