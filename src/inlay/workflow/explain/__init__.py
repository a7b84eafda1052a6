"""The explanations: what layers, samples, prompts and words tell about a model."""
