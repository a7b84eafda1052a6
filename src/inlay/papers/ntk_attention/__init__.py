"""Towards Infinite-Long Prefix in Transformer (NTK-Attention)."""

TITLE = "Towards Infinite-Long Prefix in Transformer (NTK-Attention)"
