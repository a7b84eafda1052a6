# %% [markdown]
# # Compress a prompt
#
# **The question.** Every request begins with the same long instructions. Must the model read them every time?
#
# **The answer.** No. `inlay compress` turns the prompt into a small adapter, which takes the room of a few tokens. How much is kept depends
# on the room; the picture below shows it for a short prompt. Instructions and style survive, names and numbers may not.
#
#     inlay compress --model embedded:smollm2 --prompt prompt.txt --out adapter/
#
# The model here is small (135 million parameters) and the prompt is short, so that the notebook runs on a CPU. For prompts of 2,000 tokens,
# see [what was measured](../docs/compress.md#measurements).

# %%
import os
import shutil
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
from IPython.display import display
from peft import PeftModel

import inlay
from inlay.workflow.compress import Options

SMALL = os.environ.get("INLAY_NOTEBOOKS") == "small"  # a quick check: one size, few texts
pd.set_option("display.max_columns", None, "display.max_colwidth", None, "display.width", 200)

# %% [markdown]
# ## The prompt
#
# Put your own file here.

# %%
PROMPT = """You write for the guests of the Harbour Hotel, a small family hotel by the sea. Be warm, brief and practical. Use short
sentences and plain words. Speak of the hotel as "our house" and of the guests as "our friends".

Facts about the house. Breakfast is from seven to ten, on the terrace when the sun shines. The kitchen bakes its own bread and serves fish
from the harbour every evening. The pool opens at eight in the morning and closes at nine in the evening. Dogs are welcome and sleep free of
charge. A room with a view of the sea costs ten euros more. The garage costs twelve euros a night. The station is ten minutes away on foot,
and our bus to the beach leaves at every full hour. Check-out is at eleven; luggage can stay until the evening.

Three letters to our friends follow.

"""
Path("prompt.txt").write_text(PROMPT)
print(len(PROMPT.split()), "words")

# %% [markdown]
# ## Compress it to several sizes
#
# The prompted model writes texts of its own first. The adapter is then fitted to act on them as the prompt does (`steps=0`: by least
# squares alone, which takes seconds). A fifth of the texts is held out, and only those are scored.

# %%
SIZES = [16] if SMALL else [8, 32, 96]
found = {}
for size in SIZES:
    shutil.rmtree(f"adapter-{size}", ignore_errors=True)
    options = Options(size=size, texts=10 if SMALL else 20, length=24 if SMALL else 32, steps=0)
    found[size] = inlay.compress(
        "embedded:smollm2", Path("prompt.txt"), f"adapter-{size}", options=options, progress=False
    )

first = found[SIZES[0]]
table = pd.DataFrame(
    [
        {
            "what the model sees": f"{size} of {each.prompt_tokens} tokens",
            "perplexity": f"{each.scores['least squares'].perplexity:.1f}",
            "of the prompt's benefit": f"{each.recovered('least squares'):.0%}",
            "on disk": f"{each.saved_bytes / 2**20:.1f} MiB",
        }
        for size, each in found.items()
    ]
)
ends = [("the full prompt", "full prompt", "100%"), ("no prompt", "no prompt", "0%")]
table = pd.concat(
    [
        table,
        pd.DataFrame(
            [
                {
                    "what the model sees": name,
                    "perplexity": f"{first.scores[key].perplexity:.1f}",
                    "of the prompt's benefit": share,
                    "on disk": "",
                }
                for name, key, share in ends
            ]
        ),
    ]
)
display(table.set_index("what the model sees"))

# %%
figure, axes = plt.subplots(figsize=(6, 3.2))
axes.plot(list(found), [100 * each.recovered("least squares") for each in found.values()], marker="o", color="teal")
axes.axhline(100, color="grey", linestyle=":")
axes.annotate("the full prompt", (SIZES[0], 100), xytext=(0, 4), textcoords="offset points", color="grey")
axes.set_xlabel(f"tokens kept, of {first.prompt_tokens}")
axes.set_ylabel("% of the prompt's benefit")
axes.set_ylim(0, 115)
axes.spines[["top", "right"]].set_visible(False)
plt.savefig("sizes.png", bbox_inches="tight")

# %% [markdown]
# The share is that of the prompt's gain in log-likelihood on the held-out texts. They are few and short here, so take the curve's shape from
# it and not its last digit.
#
# ## Read what it writes
#
# A number does not show what was lost. The beginnings of held-out texts, and how each continues them:

# %%
best = found[SIZES[-1]]
display(
    pd.DataFrame(
        [
            {
                "text begins": each.beginning,
                "with the full prompt": each.prompted,
                f"with the adapter of {SIZES[-1]} tokens": each.adapter,
                "with neither": each.bare,
            }
            for each in best.generations
        ]
    ).set_index("text begins")
)

# %% [markdown]
# ## Use it
#
# The folder is an ordinary adapter. After `import inlay`, PEFT loads it, and the model answers without the prompt. Does it still know when
# breakfast is? (So small a model soon repeats itself, with the prompt as without.)

# %%
backbone = inlay.load_backbone("embedded:smollm2", kind="causal-lm")
model = PeftModel.from_pretrained(backbone.model, f"adapter-{SIZES[-1]}").eval()
tokens = backbone.processor("Dear friends, breakfast", return_tensors="pt")
written = model.generate(**tokens, max_new_tokens=30, do_sample=False)
print(backbone.processor.decode(written[0], skip_special_tokens=True))

# %% [markdown]
# ## What to try next
#
# - Talk to both sides: `inlay chat --adapter adapter/ --prompt prompt.txt`.
# - Better fits: the default also trains for 150 steps, and writes 320 texts of its own. Give texts of your own with `--texts`.
# - Let the size be found: `--quality 0.95`.
# - Many prompts in one batch: `inlay serve --prompts prompts/` ([serve](../docs/serve.md)).
# - The forms that other servers read, long prompts, limits: [compress](../docs/compress.md).
