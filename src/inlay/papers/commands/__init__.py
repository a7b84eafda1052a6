"""The commands of the papers: `inlay lab`, `inlay reproduce`, and what they add to `inlay explain`."""
