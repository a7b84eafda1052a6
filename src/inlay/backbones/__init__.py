"""Frozen models: from the hub, from a folder, or embedded."""
