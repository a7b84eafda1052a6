"""Visual Prompting Reimagined: The Power of Activation Prompts."""

TITLE = "Visual Prompting Reimagined: The Power of Activation Prompts"
