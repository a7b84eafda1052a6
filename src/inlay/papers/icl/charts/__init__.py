"""Charts of in-context learning with representations."""
