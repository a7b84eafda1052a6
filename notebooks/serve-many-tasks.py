# %% [markdown]
# # Many tasks in one model, served
#
# **The question.** You have several classifiers for the same kind of text. Must each have a model of its own, and a server of its own?
#
# **The answer.** No. One run trains a LoRA and a head for each task on one frozen model, and one server answers all of them. Requests of
# different tasks go through the model in one pass:
#
#     inlay tune --model embedded:minilm --tasks tasks.yaml --method lora
#     inlay serve --adapter runs/<id>
#
# This notebook makes three small tasks, trains them, starts the server, asks it, and stops it.

# %%
import itertools
import json
import os
import random
import re
import subprocess
import sys
import urllib.request

import pandas as pd
from IPython.display import display

import inlay

SMALL = os.environ.get("INLAY_NOTEBOOKS") == "small"  # a quick check: few rows, few steps
pd.set_option("display.max_columns", None, "display.max_colwidth", None, "display.width", 200)

# %% [markdown]
# ## Three tasks
#
# Each is a CSV file with the columns `text` and `label`. Put your own files here.

# %%
PARTS = {
    "mood": {
        "happy": (["I love", "We really enjoyed", "How wonderful:", "I am so glad about"],),
        "upset": (["I hate", "We were let down by", "How awful:", "I am so angry about"],),
    },
    "topic": {
        "sport": (["the match", "the race", "our goalkeeper", "the new stadium", "the marathon", "the tennis final"],),
        "food": (["the soup", "this restaurant", "the cake", "your bread", "the spicy noodles", "the breakfast"],),
        "travel": (["the flight", "our hotel", "the train ride", "the beach", "the airport", "the city tour"],),
    },
    "urgent": {
        "today": (["Please answer today.", "This cannot wait.", "I need help right now.", "It is an emergency."],),
        "later": (["There is no hurry.", "Any time is fine.", "Just for your information.", "Tell me next month."],),
    },
}


def write_sentences(task: str) -> pd.DataFrame:
    """Sentences with a mood, a topic and an urgency; the label is that of one of them."""
    rows = []
    for mood, topic, urgent in itertools.product(*(PARTS[each] for each in ("mood", "topic", "urgent"))):
        label = {"mood": mood, "topic": topic, "urgent": urgent}[task]
        pieces = PARTS["mood"][mood] + PARTS["topic"][topic] + PARTS["urgent"][urgent]
        rows += [(f"{first} {second}. {third}", label) for first, second, third in itertools.product(*pieces)]
    random.Random(task).shuffle(rows)
    return pd.DataFrame(rows[: 60 if SMALL else 240], columns=["text", "label"])


for task in PARTS:
    write_sentences(task).to_csv(f"{task}.csv", index=False)
display(write_sentences("topic").head(3))

# %% [markdown]
# ## One run for all
#
# In a file `tasks.yaml` the same is three entries of a name and a path ([many tasks](../docs/many-tasks.md)).

# %%
spec = inlay.Spec(
    model="embedded:minilm",
    method="lora",
    tasks=tuple(PARTS),
    task_fields={task: {"data": f"{task}.csv", "text": ["text"], "label": "label"} for task in PARTS},
    epochs=1 if SMALL else 3,
)
run = inlay.tune(spec, progress=False)
display(
    pd.DataFrame(
        {task: {"accuracy on held-out rows": f"{run.metrics['test'][f'{task}/accuracy']:.0%}"} for task in PARTS}
    )
)

# %% [markdown]
# The sentences come from few parts, so the tasks are easy. What matters here is that one model learnt three things without forgetting one
# for another: each task has its own LoRA.
#
# ## Serve it
#
# `--port 0` takes a free port, and the server listens on this machine alone. It says its address when it is ready.

# %%
server = subprocess.Popen(
    [sys.executable, "-m", "inlay", "serve", "--adapter", str(run.folder), "--port", "0"],
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
)
address = None
for line in server.stdout:
    if found := re.search(r"http://127\.0\.0\.1:\d+", line):
        address = found[0]
        break
if address is None:
    raise RuntimeError(f"the server ended with status {server.wait()}")
print("the server is ready")

# %% [markdown]
# A request is a row, or a list of rows of any tasks. `curl $ADDRESS/predict --json '[...]'` does the same.

# %%
TEXTS = [
    "What a great goal, I am thrilled! Call me when you like.",
    "The plane was late and nobody helped us. Answer me immediately!",
    "Lovely dinner, the best pasta of my life. No need to reply.",
]


def ask(path: str, rows: list[dict] | None = None) -> str:
    """What the server answers."""
    body = None if rows is None else json.dumps(rows).encode()
    request = urllib.request.Request(address + path, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return answer.read().decode()


answers = json.loads(ask("/predict", [{"task": task, "text": text} for text in TEXTS for task in PARTS]))
table = pd.DataFrame(answers).pivot(index="text", columns="task", values="label")
display(table.loc[TEXTS, list(PARTS)])

# %% [markdown]
# Nine rows, three tasks. The server counts them, and the batches (`inlay_batch_rows_count`):

# %%
for line in ask("/metrics").splitlines():
    if line.startswith(("inlay_rows_total", "inlay_batch_rows_count")):
        print(line)

# %% [markdown]
# ## Stop it
#
# Ctrl-C or SIGTERM: the server answers what is waiting, and ends.

# %%
server.terminate()
print("the server ended with status", server.wait(timeout=60))
server.stdout.close()

# %% [markdown]
# ## What to try next
#
# - Open the server's address in a browser while it runs: a page with a form for every task, and live numbers.
# - Add a task to a running server, set limits, ask with a token from another machine: [serve](../docs/serve.md).
# - You have LoRAs already? `inlay serve --model embedded:minilm --adapters loras/` serves a folder of PEFT's.
# - Write a task out as an ordinary adapter of PEFT's: `inlay export --adapter runs/<id> --task mood --output mood-lora`.
