"""Data sets with their templates, labels and metrics."""
