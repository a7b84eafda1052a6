"""InfoPrompt: Information-Theoretic Soft Prompt Tuning for Natural Language Understanding."""

TITLE = "InfoPrompt: Information-Theoretic Soft Prompt Tuning for Natural Language Understanding"
