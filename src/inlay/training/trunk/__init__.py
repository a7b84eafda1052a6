"""The frozen part of a model before its first trained piece, computed once."""
