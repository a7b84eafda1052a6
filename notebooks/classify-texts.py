# %% [markdown]
# # Sort messages: text classification from a CSV
#
# **The question.** You have a table of messages, each with a label. Can a small model learn to sort new ones, on a CPU, in a minute?
#
# **The answer.** Yes. One command trains it. With about 50 rows for each class, it sorts 19 of 20 messages right that were written by hand:
#
#     inlay tune --model embedded:minilm --data messages.csv --test-data held-out.csv \
#         --text message --label team --method lora
#
# This notebook does the same in Python. The base model stays frozen, and what it trains has less than 1 MiB.

# %%
import os
import random

import matplotlib.pyplot as plt
import pandas as pd
from IPython.display import display

import inlay

SMALL = os.environ.get("INLAY_NOTEBOOKS") == "small"  # a quick check: few rows, few steps
pd.set_option("display.max_columns", None, "display.max_colwidth", None, "display.width", 200)

# %% [markdown]
# ## The data: two CSV files
#
# Put your own file here. This notebook writes one: messages to a shop, made from a few patterns, for four teams.

# %%
PATTERNS = {
    "delivery": [
        "When will the {} arrive?",
        "My {} is three days late.",
        "The parcel with the {} was left in the rain.",
        "The driver took the {} to the wrong house.",
        "Please send the {} to my office instead.",
        "I moved. Can you ship the {} to my new address?",
    ],
    "payment": [
        "I was charged twice for the {}.",
        "The invoice for the {} has the wrong amount.",
        "Can I pay for the {} in three parts?",
        "My card was declined when I ordered the {}.",
        "The discount on the {} is not on my bill.",
        "Where is my refund for the {}?",
    ],
    "repair": [
        "The {} stopped working after a week.",
        "The handle of the {} broke off.",
        "The {} makes a strange noise.",
        "How do I get spare parts for the {}?",
        "The {} does not switch on.",
        "There is a crack in the {}.",
    ],
    "praise": [
        "I love the {}, thank you!",
        "The {} is even better than I hoped.",
        "My whole family enjoys the {}.",
        "Great service, and the {} is lovely.",
        "The {} is the best that I ever had.",
        "I will tell all my friends about the {}.",
    ],
}
THINGS = ["kettle", "lamp", "toaster", "chair", "radio", "clock", "blender", "fan", "heater", "printer"]

rows = [
    (pattern.format(thing), team) for team, patterns in PATTERNS.items() for pattern in patterns for thing in THINGS
]
random.Random(0).shuffle(rows)
messages = pd.DataFrame(rows[: 80 if SMALL else 200], columns=["message", "team"])
messages.to_csv("messages.csv", index=False)
display(messages.head(4))

# %% [markdown]
# Rows made from patterns resemble each other. So the test set is written by hand: other things, other words.

# %%
HELD_OUT = {
    "delivery": [
        "It has been a week and there is still no package.",
        "Tracking says handed over, but nobody rang my bell.",
        "Could the courier come in the evening?",
        "I am on holiday, please keep my order until Monday.",
        "The box went to my neighbour, who is away.",
    ],
    "payment": [
        "There are two withdrawals on my bank statement.",
        "I need a receipt with the tax number of my company.",
        "The voucher code was not accepted at the checkout.",
        "You still owe me the money for what I sent back.",
        "Do you take bank transfers?",
    ],
    "repair": [
        "The screen flickers and then goes black.",
        "One leg is loose and it wobbles.",
        "It gets hot and smells of burnt plastic.",
        "The battery is empty after ten minutes.",
        "The button is stuck. Is this under guarantee?",
    ],
    "praise": [
        "What a friendly team you are!",
        "Just wanted to say how happy we are with it.",
        "Five stars, I would buy it again at once.",
        "It looks beautiful in our kitchen.",
        "Wonderful quality for the price.",
    ],
}
held_out = pd.DataFrame(
    [(text, team) for team, texts in HELD_OUT.items() for text in texts], columns=["message", "team"]
)
held_out.to_csv("held-out.csv", index=False)

# %% [markdown]
# ## Train
#
# A `Spec` says what a run is. `inlay.tune` makes the run, or finds it if it was made before. We train twice: only a new head on top of the
# frozen model (`linear-probe`), and small low-rank matrices inside of it (`lora`).

# %%
runs = {}
for method in ("linear-probe", "lora"):
    spec = inlay.Spec(
        model="embedded:minilm",
        data="messages.csv",
        test_data="held-out.csv",
        text=["message"],
        label="team",
        method=method,
        epochs=2 if SMALL else 10,
    )
    runs[method] = inlay.tune(spec, progress=False)

table = pd.DataFrame(
    {
        "accuracy on the hand-written messages": {
            name: f"{run.metrics['test']['accuracy']:.0%}" for name, run in runs.items()
        },
        "parameters trained": {name: f"{run.portrait['parameters']['trained']:,}" for name, run in runs.items()},
        "size on disk": {name: f"{run.portrait['saved_bytes'] / 1024:.0f} KiB" for name, run in runs.items()},
    }
)
display(table)

# %% [markdown]
# There are only 20 test messages: one more right answer is 5 points. Do not choose between two methods by such a difference.
# [Compare methods and read the report](compare-methods.py) shows how to do that honestly.
#
# ## Use it
#
# `inlay.load` gives a run back, in any later program. `inlay predict --run runs/<id> --input new.csv` does the same for a file.

# %%
sorter = inlay.load(runs["lora"])
new = [
    "Nothing has come yet and I need it for Saturday.",
    "It fell apart on the first day.",
    "Why is the total higher than the price on your page?",
    "You made my day!",
    "The lid is broken and I want my money back.",
]
answers = sorter.predict(new, probabilities=True)
display(pd.DataFrame({"message": new, "team": [answer["label"] for answer in answers]}))

# %% [markdown]
# The last message belongs to two teams. The probabilities tell how sure the model is: send what is unclear to a person.

# %%
shares = pd.DataFrame([answer["probabilities"] for answer in answers], index=new).iloc[::-1]
axes = shares.plot.barh(stacked=True, figsize=(9, 3), colormap="viridis")
axes.set_xlabel("probability")
axes.legend(ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1), frameon=False)
axes.spines[["top", "right"]].set_visible(False)
plt.savefig("probabilities.png", bbox_inches="tight")

# %% [markdown]
# ## What to try next
#
# - Your own file: `inlay tune --model embedded:minilm --data yours.csv --text body --label stars --method lora`. Without `--test-data`
#   a fifth of the rows is held out for the test ([your own data](../docs/your-own-data.md)).
# - Several labels in one cell, ordered classes, numbers instead of classes: the same page.
# - Rare classes: `--class-weights balanced`.
# - Let a short comparison pick the method: `--method auto`.
