"""The commands of `inlay explain`."""
