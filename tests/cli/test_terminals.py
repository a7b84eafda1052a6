"""Every command on terminals of several widths and in a pipe, with and without colour: its result, its mistakes, its
help. A command that has no case here fails the first test."""

from __future__ import annotations

import csv
import inspect
import json
import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Collection, Iterator
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from rich.cells import cell_len
from typer.main import get_command

import zoo
from checkpoints import write_tokenizer
from hub_server import Hub
from inlay.cli import show
from inlay.cli.app import app
from prompted import adapter
from pseudo_terminal import NARROW, PIPE, SETTINGS, Printed, Seen, Setting, attached, type_in

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
QUICK = ("--max-steps", "2", "--batch-size", "8", "--seeds", "1")
OWN = ("--data", "reviews.csv", "--text", "body", "--label", "stars")
ONE = ("--max-steps", "2", "--batch-size", "8")
TEXT = ("--model", "my-model", *OWN)
LOOK = ("--model", "my-vit", "--data", "photos", "--split", "train", "--batch-size", "8", "--examples", "8")
IMAGES = ("--model", "my-vit", "--data", "photos", *QUICK)
RUN = "reviews-my-model-bias-s0"  # the beginning of the run's name
PROMPTED = "reviews-my-model-infoprompt-s0"

# For every command: what it is given to work, and to fail by the user's mistake.
CASES: dict[str, tuple[str | tuple[str, ...], str | tuple[str, ...]]] = {
    "tune": ((*TEXT, *ONE, "--method", "bias"), (*TEXT, "--method", "biass")),
    "compare": ((*TEXT, *ONE, "--methods", "bias,linear-probe", "--seeds", "2", "--baseline", "bias"),
                (*TEXT, "--methods", "bias,biass")),
    "sweep": ("sweep.yaml --dry-run", "reviews.csv"),
    "predict": (("--run", RUN, "--input", "reviews.csv"), "--run nowhere --input reviews.csv"),
    "evaluate": (("--run", RUN, "--data", "reviews.csv"), "--run nowhere --data reviews.csv"),
    "compress": ("--model decoder --prompt prompt.txt --out compressed --count 10 --length 6 --steps 2 --batch-size 4",
                 "--model decoder --prompt nowhere.txt --out compressed"),
    "embed": ("reviews.csv --model my-model --text body", "reviews.csv --model nowhere --text body"),
    "push": (("--run", RUN, "--to", "me/moods", "--base", "someone/bert", "--out", "exported"),
             "--run nowhere --to me/moods"),
    "pull": ("me/moods --out exported", "me/nothing --out exported"),
    "generate": ("--model decoder w3 --max-tokens 4", "--model nowhere w3"),
    "doctor": ("", "--nonsense"),
    "chat": ("--adapter prompted --prompt prompt.txt --once w3 --max-tokens 9", "--adapter nowhere --once w3"),
    "reproduce": ("activation-prompts/lemma-1 --scale smoke", "activation-prompts/lema-1"),
    "export": ("--adapter tasks --task tone --output exported", "--adapter tasks --task tune --output exported"),
    "merge": (("--run", RUN, "--out", "exported"), "--run nowhere --out exported"),
    "gather": ("loras --out exported", "nowhere --out exported"),
    "report": ("runs", "nowhere"),
    "serve": ("--adapter tasks --port 0", "--adapter nowhere --port 0"),
    "methods": ("", "--paper"),
    "tasks": ("", "--kind pictures"),
    "models": ("", "--all"),
    "explain layers": (("--method", "norm", "--layers", "1", "--baselines", "", *IMAGES),
                       ("--method", "nrom", *IMAGES)),
    "explain samples": (("--methods", "norm", "--sizes", "4", *IMAGES), ("--methods", "norm", "--sizes", "x", *IMAGES)),
    "explain prompt-norm": (("--method", "activation-prompt", "--rates", "0.01", *IMAGES),
                            ("--method", "norm", "--rates", "x", *IMAGES)),
    "explain cka": (LOOK, (*LOOK, "--features", "all")),
    "explain attention-distance": (LOOK, (*LOOK, "--split", "none")),
    "explain information": (("--runs", PROMPTED, "--examples", "8", "--steps", "2"), "--runs nowhere"),
    "explain landscape": (("--run", PROMPTED, "--examples", "4", "--steps", "2", "--grid", "3"), "--run nowhere"),
    "lab icl": ("--N 4 --K 6 --d 4 --m 3 --heads 2 --steps 3 --batch 4", "--figure 9"),
    "lab decomposable": ("--figure counterexample-a1", "--figure table-9"),
    "lab softmax-regression": ("--figure lemmas-c15-c16 --seeds 1", "--figure c15"),
    "lab activation-prompts": ("--figure lemma-1", "--figure lemma-9"),
    "lab prefix": ("--figure lemma-m6 --seeds 1 --widths 4,8", "--figure lemma"),
    "runs list": ("", "--quiet"),
    "runs show": (RUN, "nowhere"),
    "runs export": ("", "nowhere"),
    "runs rm": ("copied --yes", "nowhere"),
}  # fmt: skip
# Too long to be done again at every width: done on the narrow terminal, and what it printed is printed again elsewhere.
ONCE = {"compress", "serve", "reproduce", *(name for name in CASES if name.startswith(("explain ", "lab ")))}


def tree(command: Any, *path: str) -> Iterator[tuple[str, Any]]:
    """All commands and groups of commands, by name."""
    yield " ".join(path), command
    for name, each in getattr(command, "commands", {}).items():
        yield from tree(each, *path, name)


COMMANDS = dict(tree(get_command(app)))
NAMES = [name for name, command in COMMANDS.items() if not hasattr(command, "commands")]


def words(given: str | tuple[str, ...]) -> tuple[str, ...]:
    return tuple(given.split()) if isinstance(given, str) else given


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with models, data, a finished run, one of prompts, and an adapter folder of two tasks."""
    folder = tmp_path_factory.mktemp("terminals")
    for name, family, task in (("my-model", "bert", "base"), ("decoder", "llama", "causal-lm")):
        zoo.tiny(family, task)[0].save_pretrained(folder / name)
        write_tokenizer(folder / name)
    zoo.tiny("vit", "base")[0].save_pretrained(folder / "my-vit")
    with (folder / "reviews.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["body", "stars"])
        writer.writerows([f"w{number % 3} w{6 + number % 7} w{20 + number % 5}", number % 3] for number in range(60))
    for name, level in (("bright", 220), ("dark", 30)):
        (folder / "photos" / name).mkdir(parents=True)
        for number in range(12):
            Image.new("L", (20, 20), level + number).save(folder / "photos" / name / f"{number}.png")
    (folder / "prompt.txt").write_text(" ".join(f"w{number}" for number in range(12)))
    (folder / "sweep.yaml").write_text(
        "model: my-model\ndata: reviews.csv\ntext: body\nlabel: stars\nmethods: [bias, norm]\nseeds: 2\n"
    )
    two_tasks(folder)
    a_lora(folder)
    adapter(folder / "decoder", folder / "prompted")
    return folder


def two_tasks(folder: Path) -> None:
    """The adapter folder `tasks`, as `inlay tune --tasks` leaves it, with numbers that were drawn."""
    from inlay import Spec, backbones
    from inlay.methods import registry
    from inlay.tasks import TaskSchema
    from inlay.training.joint import attach_tasks, save_tasks

    schemas = {
        name: TaskSchema(name, "image-classification", ("image",), ("accuracy",), ("no", "yes"))
        for name in ("tone", "hue")
    }
    model = str(folder / "my-vit")
    backbone = backbones.load(model, kind="image-classification", num_labels=2, label_names=("no", "yes"))
    method = registry.get("multi-lora")
    adapted = attach_tasks(backbone, schemas, method, {"r": 2})
    drawn = torch.Generator().manual_seed(0)
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data.normal_(std=0.3, generator=drawn)
    spec = Spec(model=model, method="multi-lora", tasks=tuple(schemas), batch_size=4)
    save_tasks(adapted, schemas, method, backbone, spec, folder / "tasks", None)


def a_lora(folder: Path) -> None:
    """A folder of LoRAs with one in it, as PEFT alone leaves it."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(zoo.tiny("vit")[0], LoraConfig(target_modules=["q_proj", "query"]))
    model.peft_config["default"].base_model_name_or_path = "./my-vit"
    model.save_pretrained(folder / "loras" / "one")


@pytest.fixture(scope="module")
def runs(place: Path) -> Path:
    """The folder with two finished runs in it, made by `tune`."""
    before = os.getcwd()
    os.chdir(place)
    try:
        for method in ("bias", "infoprompt"):
            settings = ("--set", "num_negatives=6") if method == "infoprompt" else ()
            printed = type_in(NARROW, "tune", *TEXT, *ONE, "--method", method, *settings)
            check(printed, NARROW, 0)
            assert "test accuracy" in printed.out
    finally:
        os.chdir(before)
    return place


def check(printed: Printed, setting: Setting, status: int, examples: Collection[str] = ()) -> None:
    """What holds for whatever a command prints. Examples in its help are lines to copy: they are not broken."""
    both = printed.out + printed.err
    assert printed.status == status, both
    assert "Traceback" not in both
    if not setting.coloured:
        assert "\x1b" not in both
    assert all(found.endswith("m") for found in ESCAPE.findall(printed.out)), "results are not drawn over"
    if setting.columns is None or "TERM" in setting.environment:
        assert "\r" not in both, "no bars where nothing can be drawn over"
    if setting.columns is None:
        return
    for line in ESCAPE.sub("", printed.out).split("\n"):
        # A name is not broken to fit; JSON, and the sentence that sums up an explanation, are for the terminal to wrap.
        whole = " " not in line.strip() or line.startswith("{") or line.endswith(".") or line.strip() in examples
        assert cell_len(line) <= setting.columns or whole, (line, setting.name)


def test_every_command_has_a_case() -> None:
    assert sorted(NAMES) == sorted(CASES)


def recorded(call: Callable[[], Printed]) -> tuple[Printed, list[tuple[Callable[..., None], Any, Any]]]:
    """What a command printed, and how it asked for that: the calls of `show` that other modules made."""
    calls: list[tuple[Callable[..., None], Any, Any]] = []
    depth = 0

    def noting(function: Callable[..., None]) -> Callable[..., None]:
        @wraps(function)
        def noted(*given: Any, **named: Any) -> None:
            nonlocal depth
            if not depth:
                calls.append((function, given, named))
            depth += 1
            try:
                function(*given, **named)
            finally:
                depth -= 1

        return noted

    with pytest.MonkeyPatch.context() as patch:
        for name, function in inspect.getmembers(show, inspect.isfunction):
            if function.__module__ == show.__name__ and inspect.signature(function).return_annotation == "None":
                patch.setattr(show, name, noting(function))
        return call(), calls


def stop(seen: Seen) -> None:
    """Ctrl-C for a service, when it says that it serves."""
    for _ in range(1200):
        if " at http://" in seen.text:
            os.kill(os.getpid(), signal.SIGINT)
            return
        time.sleep(0.05)


@pytest.fixture
def hub(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A hub on this machine that has the run's adapter."""
    server = Hub(tmp_path)
    (run,) = (runs / "runs").glob(f"{RUN}-*")
    server.folders["me/moods"] = run / "adapter"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    for name, value in (("ENDPOINT", ""), ("HUGGINGFACE_CO_URL_TEMPLATE", "/{repo_id}/resolve/{revision}/{filename}")):
        monkeypatch.setattr(f"huggingface_hub.constants.{name}", server.address + value)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    yield
    server.stop()


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ONCE])
def test_a_result(name: str, runs: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.chdir(runs)
    if name == "pull":
        request.getfixturevalue("hub")
    for setting in SETTINGS:
        shutil.rmtree("exported", ignore_errors=True)
        if name == "runs rm":
            (run,) = (folder for folder in Path("runs").glob(f"{RUN}-*"))
            shutil.copytree(run, "runs/copied")
        printed = type_in(setting, *name.split(), *words(CASES[name][0]))
        check(printed, setting, 0)
        together = printed.out + printed.err
        for expected in told(name):
            assert any(expected in line.replace("\t", " ").split() for line in ESCAPE.sub("", together).splitlines()), (
                expected
            )


def told(name: str) -> list[str]:
    """Names that a command's result has on a line, whole."""
    from inlay import tasks
    from inlay.methods.registry import all_methods

    (run,) = (folder.name for folder in Path("runs").glob(f"{RUN}-*"))
    return {
        "methods": list(all_methods()),
        "tasks": list(tasks.names()),
        "models": ["embedded:minilm", "embedded:smollm2", "embedded:vit", "embedded:resnet"],
        "runs list": [run],
        "runs show": [run],
        "tune": [f"runs/{run}"],
        "compare": ["bias", "linear-probe"],
        "export": ["exported"],
        "runs rm": ["copied"],
    }.get(name, [])


@pytest.mark.parametrize("name", sorted(ONCE))
def test_a_result_that_takes_long(name: str, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(runs)
    meanwhile = stop if name == "serve" else None
    given = words(CASES[name][0])
    printed, calls = recorded(lambda: type_in(NARROW, *name.split(), *given, meanwhile=meanwhile))
    check(printed, NARROW, 0)
    assert calls
    for setting in SETTINGS:
        with attached(setting) as (out, err):
            for function, told, named in calls:
                function(*told, **named)
        check(Printed(0, out.text, err.text), setting, 0)


@pytest.mark.parametrize("name", NAMES)
def test_a_mistake(name: str, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(runs)
    for setting in SETTINGS:
        printed = type_in(setting, *name.split(), *words(CASES[name][1]))
        check(printed, setting, 2)
        assert printed.out == ""
        assert "Error" in printed.err


@pytest.mark.parametrize("name", list(COMMANDS))
def test_help(name: str) -> None:
    examples = [line.strip() for line in COMMANDS[name].help.splitlines()]
    for setting in SETTINGS:
        printed = type_in(setting, *name.split(), "--help")
        check(printed, setting, 0, examples)
        assert "Usage: " in ESCAPE.sub("", printed.out)
        assert printed.err == ""


def test_the_list_of_recipes_and_the_version() -> None:
    from inlay.papers.reproduce import catalogue

    for setting in SETTINGS:
        printed = type_in(setting, "reproduce", "--list")
        check(printed, setting, 0)
        firsts = {line.split()[0] for line in ESCAPE.sub("", printed.out).splitlines() if line.strip()}
        assert set(catalogue.recipes()) <= firsts
        check(type_in(setting, "--version"), setting, 0)


def test_predictions_are_the_same_json_everywhere(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(runs)
    given = ("predict", "--run", RUN, "--input", "reviews.csv")
    wide, piped = (type_in(setting, *given).out for setting in (NARROW, PIPE))
    assert [json.loads(line) for line in wide.splitlines()] == [json.loads(line) for line in piped.splitlines()]
