"""Parameter-Efficient Fine-Tuning via Partially Decomposable Loss Analysis and Sharing (Multi-LoRA)."""

TITLE = "Parameter-Efficient Fine-Tuning via Partially Decomposable Loss Analysis and Sharing (Multi-LoRA)"
