"""The verbs: tune, compare, predict."""
