"""inlay: small trained pieces set into large frozen models."""

__version__ = "0.1.0"
