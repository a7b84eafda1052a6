"""Adapted models over HTTP: requests of many tasks in one pass, batched as they come.

`hosting` holds the model and its tasks, `batching` the queue and the one thread that runs the model, `reading` turns
what a client sent into rows, `web` is the application, `running` the process around it. A language model with many
compressed prompts is `prompts` in place of `hosting`, and `prompt_web` in place of `web`.
"""
