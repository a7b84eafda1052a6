"""Runs on disk: see store.py. Imports nothing heavy."""

from inlay.records.spec import Spec
from inlay.records.store import FORMAT, Run, Store

__all__ = ["FORMAT", "Run", "Spec", "Store"]
