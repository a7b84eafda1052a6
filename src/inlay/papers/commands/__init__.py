"""The commands of the papers: `inlay lab` and `inlay reproduce`."""
