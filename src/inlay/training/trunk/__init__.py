"""The frozen part of a model before its first trained piece, computed once."""

from inlay.training.trunk.cut import TrunkCache

__all__ = ["TrunkCache"]
