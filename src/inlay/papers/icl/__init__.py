"""In-Context Learning with Representations: Contextual Generalization of Trained Transformers."""

TITLE = "In-Context Learning with Representations: Contextual Generalization of Trained Transformers"
