"""Explanations: how a method does by layer and by training-set size, and what a model computes in its layers."""
