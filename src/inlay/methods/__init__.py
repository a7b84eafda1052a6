"""The methods, one folder each, in PEFT's own shape; see registry.py."""
