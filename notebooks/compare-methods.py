# %% [markdown]
# # Compare methods and read the report
#
# **The question.** There are 28 methods. Which one suits your data, and how sure can you be?
#
# **The answer.** Train a few of them with several seeds, and look at the intervals. A method is better than another only if the difference is
# larger than what chance makes of the seeds. One command does that, and writes a page:
#
#     inlay compare --model embedded:vit --task digits --methods linear-probe,bias,lora \
#         --shots 200 --epochs 5 --batch-size 16 --seeds 3
#     inlay report runs/ --out report.html
#
# Here `bias` has the highest mean, six points above training only a new head. Three seeds are too few to call that a
# difference. Paired by seed, it is better than `lora`, which is nearer to it: what counts is how steady a difference is, not only how large.

# %%
import os
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
from IPython.display import IFrame, display

import inlay
from inlay.report.html import write_report
from inlay.workflow.comparison import words

SMALL = os.environ.get("INLAY_NOTEBOOKS") == "small"  # a quick check: few images, few steps

# %% [markdown]
# ## Compare
#
# The model and the data are in the package: a small vision transformer that was trained on photos, and 8 x 8 scans of handwritten digits.
# Each method trains on the same 200 digits, three times. A seed decides the new head, the order of the rows and what is held out.

# %%
spec = inlay.Spec(
    model="embedded:vit",
    task="digits",
    method="linear-probe",  # each of the methods below in its place
    shots=60 if SMALL else 200,
    epochs=1 if SMALL else 5,
    batch_size=16,
)
found = inlay.compare(spec, ["linear-probe", "bias", "lora"], seeds=2 if SMALL else 3, progress=False)

# %% [markdown]
# Nothing is trained twice: run this cell again, or add a method or a seed, and the finished runs are found.
#
# ## Read the table
#
# The mean over seeds, and half the width of its 95 % confidence interval.

# %%
table = pd.DataFrame(
    [
        {
            "method": row.method,
            "test accuracy": f"{row.mean:.3f} ± {row.interval:.3f}",
            "each seed": ", ".join(f"{value:.3f}" for value in row.values),
            "parameters": f"{row.trained:,}",
            "on disk": f"{row.saved_bytes / 1024:.0f} KiB",
            "peak memory": f"{row.peak_memory / 2**20:.0f} MiB",
        }
        for row in found.rows
    ]
)
display(table.set_index("method"))
for sentence in words(found, baseline="linear-probe"):
    print(sentence)

# %% [markdown]
# How to read it:
#
# 1. **Is it above chance?** The command says so if it is not. With ten classes, chance is about 0.1.
# 2. **Do not compare intervals by eye.** The sentences use a paired test: both methods had the same seeds, so what is easy or hard about a
#    seed cancels. The tests are corrected for the number of methods.
# 3. **No significant difference is no proof of equality.** More seeds make the interval smaller; more data and more epochs may part the
#    methods. With 400 digits and five methods it is the table on [the start page](../README.md).
# 4. **What does it cost?** Among methods that do not differ, take the cheaper one.

# %%
figure, axes = plt.subplots(figsize=(6, 3.2))
for row in found.rows:
    axes.errorbar(row.trained, row.mean, yerr=row.interval, fmt="o", capsize=4)
    axes.annotate(row.method, (row.trained, row.mean), xytext=(8, -3), textcoords="offset points")
axes.set_xscale("log")
axes.set_xlim(right=4 * max(row.trained for row in found.rows))
axes.set_xlabel("parameters trained")
axes.set_ylabel("test accuracy, 95 % interval")
axes.spines[["top", "right"]].set_visible(False)
plt.savefig("comparison.png", bbox_inches="tight")

# %% [markdown]
# ## Read the report
#
# The page has the same in one file, which you can open from disk or send to somebody. Begin at the top: the conclusion in words, then what is
# *not* comparable, then the table. Further down: scores of each class, the confusion matrix, calibration, the most confident mistakes,
# learning curves, and the command of every run.

# %%
write_report(Path("runs"), Path("report.html"))
display(IFrame("report.html", width="100%", height=600))

# %% [markdown]
# ## What to try next
#
# - Your own data: `inlay compare --model ./my-model --data reviews.csv --text body --label stars --methods all --seeds 5`.
# - The default learning rate may suit one method and not another: `--learning-rates grid` selects each on the validation set.
# - What changed since last week? `inlay report runs/ --against old-runs/` ([the report](../docs/report.md)).
# - Several processes, a cluster, time limits, learning curves over the size of the data: [compare](../docs/compare.md).
