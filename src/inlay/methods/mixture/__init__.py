"""Batches whose rows belong to several tasks, all in one pass: which rows are whose, where the tasks' low-rank factors
lie, their products, heads and losses. For `multi-lora`, and for LoRAs of PEFT's own (`lora.py`)."""
