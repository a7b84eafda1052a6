# %% [markdown]
# # Images in class folders
#
# **The question.** Your photos are in folders, one for each class. What does it take to get a classifier, and what does it get wrong?
#
# **The answer.** The path of the folder. With 40 images of a class, a small frozen vision transformer and a LoRA, about five of six answers are right:
#
#     inlay tune --model embedded:vit --data photos/ --method lora
#
# Look at the mistakes before you trust the number. The last picture below shows them.

# %%
import os
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from IPython.display import display
from PIL import Image
from sklearn.datasets import load_digits

import inlay

SMALL = os.environ.get("INLAY_NOTEBOOKS") == "small"  # a quick check: few images, few steps

# %% [markdown]
# ## The data: a folder for each class
#
# Scans of handwritten digits from scikit-learn stand for your photos. The layout is all that matters:
#
#     photos/train/zero/0001.png        photos/test/zero/1001.png
#     photos/train/one/0002.png         photos/test/one/1002.png
#
# Without `train` and `test`, class folders alone are enough: then a part of the images is held out for the test.

# %%
NAMES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
EACH = {"train": 8 if SMALL else 40, "test": 4 if SMALL else 30}

digits = load_digits()
photos = Path("photos")
for number, name in enumerate(NAMES):
    found = np.flatnonzero(digits.target == number)
    for split, chosen in (("train", found[: EACH["train"]]), ("test", found[-EACH["test"] :])):
        folder = photos / split / name
        folder.mkdir(parents=True, exist_ok=True)
        for index in chosen:
            scan = Image.fromarray((255 - digits.images[index] * 15.9).astype("uint8"))
            scan.resize((64, 64), Image.Resampling.BICUBIC).convert("RGB").save(folder / f"{index:04d}.png")

figure, places = plt.subplots(1, 10, figsize=(9, 1.2))
for place, name in zip(places, NAMES, strict=True):
    place.imshow(Image.open(sorted((photos / "train" / name).iterdir())[0]))
    place.set_title(name, fontsize=9)
    place.axis("off")
plt.savefig("classes.png", bbox_inches="tight")

# %% [markdown]
# ## Train
#
# `embedded:vit` is in the package: 2.7 million parameters, trained on photos of ten kinds of object (CIFAR-10). It has never seen a digit.
# For photos of your own, a larger one is better: `--model google/vit-base-patch16-224`.

# %%
spec = inlay.Spec(model="embedded:vit", data="photos", method="lora", epochs=1 if SMALL else 8, batch_size=16)
run = inlay.tune(spec, progress=False)
test = run.metrics["test"]
print(f"{test['accuracy']:.1%} of {run.record['examples']['test']} test images are right")
print(f"{run.portrait['parameters']['trained']:,} parameters trained")

# %% [markdown]
# ## Look at the mistakes
#
# Which classes are mixed up? Rows are the true classes, columns the answers.

# %%
classifier = inlay.load(run)
paths = sorted((photos / "test").rglob("*.png"))
answers = classifier.predict([{"image": str(path)} for path in paths])
found = pd.DataFrame(
    {
        "path": paths,
        "true": [path.parent.name for path in paths],
        "answer": [answer["label"] for answer in answers],
        "score": [answer["score"] for answer in answers],
    }
)
display(pd.crosstab(found["true"], found["answer"]).reindex(index=NAMES, columns=NAMES, fill_value=0))

# %% [markdown]
# The mistakes of which the model is most sure come first. Some of them a person would also get wrong; the others say which images
# to collect more of.

# %%
wrong = found[found["true"] != found["answer"]].sort_values("score", ascending=False).head(10)
figure, places = plt.subplots(1, 10, figsize=(9, 1.6))
for place in places:
    place.axis("off")
for place, row in zip(places, wrong.itertuples(), strict=False):
    place.imshow(Image.open(row.path))
    place.set_title(f"{row.true},\nsaid {row.answer}\n{row.score:.0%}", fontsize=8)
plt.savefig("mistakes.png", bbox_inches="tight")

# %% [markdown]
# ## What to try next
#
# - `inlay predict --run runs/<id> --input new-photos/ --output answers.jsonl` labels a folder.
# - `inlay report runs/ --out report.html` draws the confusion matrix, the scores of every class, the calibration and the most confident
#   mistakes ([the report](../docs/report.md)).
# - Fewer parameters, or less memory: [what each method costs](../docs/cost.md), and [which is best on your images](compare-methods.py).
# - Several labels an image, numbers instead of classes, a CSV with paths: [your own data](../docs/your-own-data.md).
