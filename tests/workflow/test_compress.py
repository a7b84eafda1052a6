"""`inlay compress` and its verb: what is written, what it says, and what is refused before any work."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel, PrefixTuningConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

import zoo
from checkpoints import write_tokenizer
from inlay import console
from inlay.cli.app import app
from inlay.errors import InlayError
from inlay.training import distil
from inlay.workflow.compress import Options, compress, parted, split, targets

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
PROMPT = " ".join(f"w{number}" for number in range(12))
LONG = " ".join(f"w{(7 * number) % 30}" for number in range(100))
NTK = "ntk-attention"
QUICK = Options(steps=3, texts=10, length=6, batch_size=4, learning_rate=1e-2)


def checkpoint(folder: Path, family: str = "llama", task: Any = "causal-lm") -> Path:
    zoo.tiny(family, task)[0].save_pretrained(folder)
    write_tokenizer(folder)
    return folder


@pytest.fixture
def decoder(tmp_path: Path) -> Path:
    return checkpoint(tmp_path / "decoder")


def run(*words: str | Path) -> Any:
    return CliRunner().invoke(app, ["compress", *map(str, words)])


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_adapter_loads_with_peft_and_generates_without_the_prompt(family: str, tmp_path: Path) -> None:
    folder, out = checkpoint(tmp_path / family, family), tmp_path / "adapter"
    found = compress(str(folder), PROMPT, out, options=QUICK, progress=False)
    assert list(found.scores) == ["full prompt", "no prompt", "closed form", "least squares", "distilled"]
    assert found.recovered("full prompt") in (1, None)
    assert found.scores["full prompt"].divergence == pytest.approx(0, abs=1e-6)
    assert not {".bin", ".pt", ".pkl"} & {file.suffix for file in out.iterdir()}
    assert {file.name for file in tmp_path.iterdir()} == {family, "adapter"}  # no leftovers
    record = json.loads((out / "compress.json").read_text())
    assert record["scores"]["distilled"]["nll"] == found.scores["distilled"].nll
    assert len(record["losses"]) == 3
    model = AutoModelForCausalLM.from_pretrained(folder)
    model = PeftModel.from_pretrained(model, str(out)).eval()
    ids = AutoTokenizer.from_pretrained(folder)("w3 w5 w7", return_tensors="pt").input_ids
    assert model.generate(input_ids=ids, max_new_tokens=4, do_sample=False, pad_token_id=1).shape[1] > ids.shape[1]
    again = compress(str(folder), PROMPT, tmp_path / "again", options=QUICK, progress=False)
    assert again.scores == found.scores
    tensors, same = (load_file(place / "adapter_model.safetensors") for place in (out, tmp_path / "again"))
    assert all(torch.equal(tensor, same[name]) for name, tensor in tensors.items())


def test_the_command_prints_a_table(decoder: Path, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text(PROMPT)
    quick = ("--steps", "0", "--count", "10", "--length", "6")
    done = run("--model", decoder, "--prompt", tmp_path / "prompt.txt", "--out", tmp_path / "a", *quick)
    assert done.exit_code == 0, done.output
    assert "least squares" in done.output
    assert "distilled" not in done.output
    done = run("--model", decoder, "--prompt", tmp_path / "prompt.txt", "--out", tmp_path / "b", *quick, "--no-distil")
    assert done.exit_code == 0, done.output
    assert "closed form" in done.output
    assert "least squares" not in done.output


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_generations_shown_are_transformers_own(family: str, tmp_path: Path) -> None:
    """With the prompt, with the adapter, with neither: what `generate` writes, greedily, after the same beginning."""
    folder, out = checkpoint(tmp_path / family, family), tmp_path / "adapter"
    texts = [" ".join(f"w{(7 * row + step) % 30}" for step in range(8)) for row in range(10)]
    found = compress(str(folder), PROMPT, out, texts=texts, options=QUICK, progress=False)
    assert len(found.generations) == 2, "a fifth of ten texts is held out"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), str(out)).eval()
    lead, prompt = split(tokenizer, PROMPT)

    def written(model: Any, ids: list[int], more: int) -> str:
        made = model.generate(input_ids=torch.tensor([ids]), do_sample=False, max_new_tokens=more, pad_token_id=1)
        return str(tokenizer.decode(made[0, len(ids) :], skip_special_tokens=True)).strip()

    for each in found.generations:
        ids = tokenizer(each.beginning, add_special_tokens=False).input_ids
        more = QUICK.length - len(ids)
        assert each.prompted == written(model, prompt + ids, more)
        assert each.adapter == written(adapted, lead + ids, more)
        assert each.bare == written(model, lead + ids, more)
    kept = "".join(file.read_text() for file in out.glob("*.json"))
    assert not any(each.prompted in kept for each in found.generations), "the folder holds no text"


def test_what_may_be_lost_is_said(decoder: Path, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text(PROMPT)
    quick = ("--no-distil", "--count", "20", "--length", "6", "--quiet")
    done = run("--model", decoder, "--prompt", tmp_path / "prompt.txt", "--out", tmp_path / "a", *quick)
    assert done.exit_code == 0, done.output
    assert "Names, numbers and exact wording of the prompt may be lost" in done.output
    assert done.output.count("\nadapter\t") == done.output.count("\nno prompt\t") - 1 == 3, (
        "the table has `no prompt` too"
    )


def test_without_a_terminal_it_says_how_far_it_is(
    decoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each stage at its start and its end, and on the way as often as `inlay.console.WrittenProgress` finds right."""
    options = Options(steps=25, texts=10, length=6, batch_size=4, learning_rate=1e-2)
    said: list[str] = []
    compress(str(decoder), PROMPT, tmp_path / "a", options=options, say=said.append)
    assert said[0].startswith("model: ")
    assert "scoring 2 held-out texts; 8 to learn from" in said
    told = capsys.readouterr().err.splitlines()
    for stage, size in (("sampling", "60 tokens"), ("fitting", "6 steps"), ("distilling", "25 steps")):
        lines = [line for line in told if line.startswith(f"{stage}: ")]
        assert lines[0] == f"{stage}: {size}"
        assert lines[-1].startswith(f"{stage}: done in ")
        assert len(lines) == 2, "seconds of work need no more"
    assert "training loss" in told[-1]
    assert "divergence" not in "".join(told), "the table has one, of other texts"
    monkeypatch.setattr(console, "APART", 0.0)
    monkeypatch.setattr(console, "GROWTH", 0.0)
    compress(str(decoder), PROMPT, tmp_path / "b", options=options)
    steps = [line for line in capsys.readouterr().err.splitlines() if " of 25 steps" in line]
    assert [line.split(",")[0] for line in steps] == [
        f"distilling: {done / 25:.0%}: {done} of 25 steps" for done in range(1, 25)
    ]
    assert all(" s left" in line for line in steps)
    compress(str(decoder), PROMPT, tmp_path / "c", options=options, progress=False)
    assert "distilling" not in capsys.readouterr().err


@pytest.mark.parametrize("name", ["texts.txt", "texts.jsonl"])
def test_texts_of_ones_own(name: str, decoder: Path, tmp_path: Path) -> None:
    texts = [f"w{number} w{number + 1} w{number + 2}" for number in range(10)]
    lines = texts if name.endswith("txt") else [json.dumps({"text": text}) for text in texts]
    (tmp_path / name).write_text("\n\n".join(lines))
    found = compress(str(decoder), PROMPT, tmp_path / "a", texts=tmp_path / name, options=QUICK, progress=False)
    assert found.record["texts"] == {"source": "given", "train": 8, "held_out": 2}
    same = compress(str(decoder), PROMPT, tmp_path / "b", texts=texts, options=QUICK, progress=False)
    assert same.scores == found.scores


def test_held_out_texts_are_not_trained_on(decoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor do they choose the best state: what is scored at the end is seen by nothing before."""
    seen: dict[str, list[list[int]]] = {}
    real_fit, real_distil = distil.fit, distil.distil

    def fit(pair: Any, texts: Any, *rest: Any) -> None:
        seen["fit"] = list(texts)
        real_fit(pair, texts, *rest)

    def train(pair: Any, texts: Any, **options: Any) -> list[float]:
        seen["learn"], seen["check"] = list(texts), list(options["check"])
        return real_distil(pair, texts, **options)

    monkeypatch.setattr(distil, "fit", fit)
    monkeypatch.setattr(distil, "distil", train)
    texts = [f"w{number} w{number + 1} w{number + 2}" for number in range(20)]
    compress(str(decoder), PROMPT, tmp_path / "a", texts=texts, options=QUICK, progress=False)
    tokenizer = AutoTokenizer.from_pretrained(decoder)
    rows = [tokenizer(text, add_special_tokens=False).input_ids for text in texts]
    held = rows[4::5]
    train = [row for row in rows if row not in held]
    assert seen["check"] == train[7::8]
    assert seen["fit"] == seen["learn"] == [row for row in train if row not in seen["check"]]


def test_it_is_said_when_no_step_helped(decoder: Path, tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text(PROMPT)
    (tmp_path / "t.txt").write_text("\n".join(f"w{number} w{number + 1} w{number + 2}" for number in range(10)))
    given = ("--model", decoder, "--prompt", tmp_path / "p.txt", "--texts", tmp_path / "t.txt", "--length", "6")
    wild = run(*given, "--out", tmp_path / "a", "--steps", "2", "--lr", "1000")
    assert wild.exit_code == 0, wild.output
    assert "No step of the distillation" in " ".join(wild.output.split())
    few = ["w1 w2 w3"] * 6  # none to check on: the last state is kept
    assert compress(str(decoder), PROMPT, tmp_path / "b", texts=few, options=QUICK, progress=False).helped


def test_a_trained_prefix_becomes_an_adapter(decoder: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(decoder)
    get_peft_model(base, PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5)).save_pretrained(
        tmp_path / "p"
    )
    texts = [f"w{number} w{number + 1} w{number + 2}" for number in range(10)]
    options: dict[str, Any] = {"options": QUICK, "progress": False}
    found = compress(str(decoder), None, tmp_path / "a", prefix_adapter=tmp_path / "p", texts=texts, **options)
    assert found.prompt_tokens == 5
    assert found.scores["closed form"].divergence < found.scores["no prompt"].divergence
    assert PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(decoder), str(tmp_path / "a"))
    for given, words in (
        ({"prefix_adapter": tmp_path / "a", "texts": texts}, r"type INLAY_COMPACT_PREFIX, not PREFIX_TUNING"),
        ({"prefix_adapter": tmp_path / "nowhere", "texts": texts}, r"prefix in .*nowhere.* cannot be loaded"),
        ({"prefix_adapter": tmp_path / "p"}, r"give texts"),
        ({}, r"one of the two"),
    ):
        with pytest.raises(InlayError, match=words):
            compress(str(decoder), None, tmp_path / "b", **given, **options)


def test_settings_reach_the_adapter(decoder: Path, tmp_path: Path) -> None:
    settings = {"feature_map": "taylor", "taylor_order": 4, "layers": [2]}
    options = replace(QUICK, to=NTK, settings=settings, distil=False)
    compress(str(decoder), PROMPT, tmp_path / "a", options=options, progress=False)
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert (config["feature_map"], config["taylor_order"]) == ("taylor", 4)
    assert (config["rank"], config["factored"]) == (None, False)  # all ranks: Z itself
    assert config["target_modules"] == ["model.layers.1.self_attn"]
    assert config["prompt_length"] == 12


def test_the_lead_is_what_the_tokenizer_puts_before_a_text() -> None:
    class Framing:
        """As tokenizers do that add a token of beginning and one of end."""

        def __call__(self, text: str, add_special_tokens: bool = True, verbose: bool = True) -> Any:
            ids = [int(word) for word in text.split()]
            return type("Encoding", (), {"input_ids": [0, *ids, 2] if add_special_tokens else ids})

    assert split(Framing(), "5 6") == ([0], [0, 5, 6])


def test_texts_are_parted() -> None:
    rows = [[number, number] for number in range(10)]
    train, held = parted(rows)
    assert held == [[4, 4], [9, 9]]
    assert len(train) == 8
    assert parted(rows[:3]) == (rows[:2], rows[2:3])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"prompt": Path("nowhere.txt")}, r"prompt file 'nowhere.txt' cannot be read: No such file"),
        ({"prompt": " \n "}, r"prompt is empty.*two tokens or more"),
        ({"prompt": "w3"}, r"prompt has one token.*two tokens or more"),
        (
            {"prompt": " ".join(["w3"] * 38), "options": replace(QUICK, to=NTK)},
            r"38 tokens and the texts behind it 6; .*40 in all.*prompt to 34 tokens",
        ),
        (
            {"options": Options(length=50)},
            r"behind it 50; .*Shorten the texts \(`length`, --length\) to 28 tokens",
        ),
        (
            {"options": replace(QUICK, to=NTK, settings={"taylor_order": 2})},
            r"taylor_order=2 says nothing.*feature_map=taylor",
        ),
        ({"texts": ["w1"]}, r"0 texts of two tokens or more.*--texts"),
        ({"texts": []}, r"0 texts of two tokens or more.*--texts"),
        (
            {"options": replace(QUICK, to=NTK, settings={"feature_map": "sigmoid"})},
            r"Unknown feature_map 'sigmoid'.*elu",
        ),
        ({"options": replace(QUICK, to=NTK, settings={"rank": 5})}, r"rank=5 is larger than the model's head size, 4"),
        ({"options": replace(QUICK, settings={"start": "zero"})}, r"start: compress sets this itself"),
        ({"options": replace(QUICK, settings={"prompt_ids": [3]})}, r"prompt_ids: compress sets this itself"),
        (
            {"options": replace(QUICK, to="lora", chunk=16), "prompt": LONG},
            r"chunk=16 .*--to lora becomes has no place",
        ),
        ({"options": replace(QUICK, chunk=16, settings={"layers": [1]}), "prompt": LONG}, r"leave out `layers`"),
    ],
)
def test_mistakes_are_said(options: dict[str, Any], words: str, decoder: Path, tmp_path: Path) -> None:
    given: dict[str, Any] = {"prompt": PROMPT, "options": QUICK} | options
    with pytest.raises(InlayError, match=words):
        compress(str(decoder), out=tmp_path / "a", progress=False, **given)
    assert not (tmp_path / "a").exists()


def test_texts_that_are_no_texts(decoder: Path, tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text('{"text": "w1 w2"}\n{"words": "w1"}\n')
    with pytest.raises(InlayError, match=r"line 2.*field `text`"):
        compress(str(decoder), PROMPT, tmp_path / "a", texts=tmp_path / "t.jsonl", options=QUICK)
    (tmp_path / "p.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InlayError, match=r"not text in UTF-8"):
        compress(str(decoder), tmp_path / "p.txt", tmp_path / "a", options=QUICK)


def test_what_no_prompt_or_texts_can_mend_is_said_before_the_work(decoder: Path, tmp_path: Path) -> None:
    """Blanks are tokens to some tokenizers, and no prompt; too few texts are said before the prompt is read."""
    (tmp_path / "blank.txt").write_text(" \n\n")
    said: list[str] = []
    with pytest.raises(InlayError, match=r"prompt is empty"):
        compress("nowhere", tmp_path / "blank.txt", tmp_path / "a", options=QUICK)
    with pytest.raises(InlayError, match=r"0 texts of two tokens"):
        compress(str(decoder), PROMPT, tmp_path / "a", texts=tmp_path / "blank.txt", options=QUICK, say=said.append)
    assert not any("reading" in line for line in said)


@pytest.mark.parametrize("name", ["embedded:resnet", "embedded:vit"])
def test_models_that_write_nothing_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(InlayError, match=r"cannot do causal-lm"):
        compress(name, PROMPT, tmp_path / "a", options=QUICK)
    assert not (tmp_path / "a").exists()


def test_an_interrupted_run_leaves_nothing_and_begins_again(
    decoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in the middle of the distillation, and while files are written; then the same command."""
    (tmp_path / "prompt.txt").write_text(PROMPT)
    words = ["--model", decoder, "--prompt", tmp_path / "prompt.txt", "--out", tmp_path / "a", "--steps", "3"]
    words += ["--count", "10", "--length", "6"]
    before = sorted(tmp_path.iterdir())
    for place in ("inlay.training.distil.divergence", "inlay.workflow.compress.write_json"):
        with monkeypatch.context() as patch:
            patch.setattr(place, _interrupted)
            done = run(*words)
        assert (done.exit_code, done.output.splitlines()[-1]) == (130, "Interrupted. Nothing was written.")
        assert sorted(tmp_path.iterdir()) == before
    done = run(*words)
    assert done.exit_code == 0, done.output
    assert (tmp_path / "a" / "adapter_model.safetensors").is_file()


def _interrupted(*args: object, **kwargs: object) -> None:
    raise KeyboardInterrupt


def test_an_encoder_and_a_full_folder_are_refused(text_model: Path, tmp_path: Path) -> None:
    with pytest.raises(InlayError, match=r"reads in both directions"):
        compress(str(text_model), PROMPT, tmp_path / "a", options=QUICK)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    done = run("--model", "nowhere", "--prompt", tmp_path / "p.txt", "--out", tmp_path / "full")
    assert done.exit_code != 0
    assert "not empty" in str(done.exception)
    assert (tmp_path / "full" / "thesis.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("field", "value"), [("steps", -1), ("texts", 1), ("length", 1), ("batch_size", 0), ("learning_rate", 0.0)]
)
def test_numbers_out_of_range(field: str, value: float) -> None:
    usual = getattr(Options, field) or Options().rate
    with pytest.raises(InlayError, match=rf"{field}=.*{usual:g} is usual"):
        Options(**{field: value})  # type: ignore[arg-type]


def test_an_unknown_precision() -> None:
    with pytest.raises(InlayError, match=r"Unknown precision 'bf16'.*bfloat16"):
        Options(precision="bf16")


def test_an_adapter_with_nan_is_refused(decoder: Path, tmp_path: Path) -> None:
    compress(str(decoder), PROMPT, tmp_path / "a", options=replace(QUICK, distil=False), progress=False)
    file = tmp_path / "a" / "adapter_model.safetensors"
    tensors = load_file(file)
    next(iter(tensors.values())).view(-1)[0] = torch.nan
    save_file(tensors, file)
    with pytest.raises(InlayError, match=r"not finite"):
        PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(decoder), str(tmp_path / "a"))


# ---- what a prompt becomes


def logits_of(folder: Path, adapter: Path | None, text: str) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder)
    model = model if adapter is None else PeftModel.from_pretrained(model, str(adapter))
    with torch.no_grad():
        return model.eval()(**AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt")).logits


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("to", list(targets()))
def test_every_target_keeps_something_of_the_prompt_and_loads(to: str, family: str, tmp_path: Path) -> None:
    """By PEFT, in a model that was never adapted here; on texts of the prompt's own kind it comes nearer to it."""
    folder, out = checkpoint(tmp_path / family, family), tmp_path / "adapter"
    texts = [f"w{number} w{number + 1} w{number + 2} w{number + 3}" for number in range(24)]
    options = replace(QUICK, to=to, steps=30, learning_rate=None)
    found = compress(str(folder), PROMPT, out, texts=texts, options=options, progress=False)
    assert found.scores["distilled"].divergence < found.scores["no prompt"].divergence
    assert not torch.allclose(logits_of(folder, out, "w3 w4"), logits_of(folder, None, "w3 w4"), atol=1e-4)
    record = json.loads((out / "compress.json").read_text())
    assert record["options"]["to"] == to
    assert record["size"] == found.tokens == (6 if targets()[to].method.takes("size") else None)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("to", ["compact-prefix", "ntk-attention"])
def test_mixed_precision_comes_to_nearly_the_same(to: str, family: str, tmp_path: Path) -> None:
    """Behind rotary embeddings queries and keys are float32 then, and values bfloat16. It is a GPU's default."""
    folder = checkpoint(tmp_path / family, family)
    texts = [" ".join(f"w{(5 * row + step) % 30}" for step in range(6)) for row in range(30)]
    found = {}
    for precision in ("float32", "bfloat16"):
        options = replace(QUICK, to=to, steps=0, precision=precision)
        out = tmp_path / precision
        found[precision] = compress(str(folder), PROMPT, out, texts=texts, options=options, progress=False).scores
    exact, mixed = (found[precision]["least squares"].divergence for precision in ("float32", "bfloat16"))
    assert mixed < found["bfloat16"]["no prompt"].divergence
    assert mixed == pytest.approx(exact, rel=0.3, abs=3e-4)


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt"])
def test_a_prompt_of_its_full_size_is_the_prompt(family: str, tmp_path: Path) -> None:
    """Every key kept and matched: the logits of the prompted model, from the folder, whoever computes them."""
    folder = checkpoint(tmp_path / family, family)
    texts = [" ".join(f"w{(5 * row + step) % 30}" for step in range(6)) for row in range(30)]
    tokens = len(split(AutoTokenizer.from_pretrained(folder), PROMPT)[1])
    options = replace(QUICK, size=tokens, steps=0)
    found = compress(str(folder), PROMPT, tmp_path / "a", texts=texts, options=options, progress=False)
    assert found.tokens == tokens
    if family == "llama":  # learned positions begin at 0 again without the prompt: that is not the prompted model
        assert found.scores["least squares"].divergence < 1e-5


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_peft_alone_computes_what_the_compact_prefix_does(family: str, tmp_path: Path) -> None:
    """A cartridge: PEFT puts it into the cache, and the text's positions begin behind it."""
    folder = checkpoint(tmp_path / family, family)
    texts = [" ".join(f"w{(5 * row + step) % 30}" for step in range(6)) for row in range(30)]
    options = replace(QUICK, steps=0, size=4)
    compress(str(folder), PROMPT, tmp_path / "c", texts=texts, options=replace(options, to="cartridge"), progress=False)
    alike = replace(options, settings={"biases": False, "budgets": "equal"})
    compress(str(folder), PROMPT, tmp_path / "p", texts=texts, options=alike, progress=False)
    config = json.loads((tmp_path / "c" / "adapter_config.json").read_text())
    assert (config["peft_type"], config["num_virtual_tokens"]) == ("CARTRIDGE", 4)
    if family == "llama":
        found, right = (logits_of(folder, tmp_path / name, "w3 w4 w5") for name in ("c", "p"))
        torch.testing.assert_close(found, right, atol=1e-5, rtol=1e-5)


def test_a_prompt_beyond_the_context_is_read_in_chunks(decoder: Path, tmp_path: Path) -> None:
    """Of 100 tokens, where the model reads 40; what comes out has the size that was asked for, and helps."""
    folder = decoder
    said: list[str] = []
    found = compress(str(folder), LONG, tmp_path / "a", options=QUICK, progress=False, say=said.append)
    assert found.prompt_tokens == 100
    assert found.record["in_chunks"]
    assert any("100 tokens in 6 chunks" in line for line in said)
    assert found.tokens == 50  # half of it, as of every short prompt
    assert found.scores["distilled"].divergence < found.scores["no prompt"].divergence
    assert not torch.allclose(logits_of(folder, tmp_path / "a", "w3 w4"), logits_of(folder, None, "w3 w4"), atol=1e-4)


def test_chunks_of_which_all_is_kept_are_the_prompt(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "llama", "llama")
    texts = [" ".join(f"w{(5 * row + step) % 30}" for step in range(6)) for row in range(30)]
    prompt = " ".join(f"w{(7 * number) % 30}" for number in range(32))
    options = replace(QUICK, size=32, steps=0, chunk=16, settings={"budgets": "equal"})
    found = compress(str(folder), prompt, tmp_path / "a", texts=texts, options=options, progress=False)
    whole = compress(
        str(folder), prompt, tmp_path / "b", texts=texts, options=replace(options, chunk=None), progress=False
    )
    assert found.record["in_chunks"]
    assert not whole.record["in_chunks"]
    assert found.scores["full prompt"].nll == pytest.approx(whole.scores["full prompt"].nll, abs=1e-4)
    torch.testing.assert_close(
        logits_of(folder, tmp_path / "a", "w3 w4 w5"),
        logits_of(folder, tmp_path / "b", "w3 w4 w5"),
        atol=1e-3,
        rtol=1e-3,
    )


def test_positions_that_are_learned_have_no_chunks(tmp_path: Path) -> None:
    with pytest.raises(InlayError, match="100 tokens in chunks has keys that must be moved"):
        compress(str(checkpoint(tmp_path / "gpt2", "gpt2")), LONG, tmp_path / "a", options=QUICK, progress=False)


def test_a_share_and_a_quality_decide_the_size(decoder: Path, tmp_path: Path) -> None:
    prompt = " ".join(f"w{number % 30}" for number in range(24))
    texts = [" ".join(f"w{(5 * row + step) % 30}" for step in range(6)) for row in range(40)]
    shared = compress(
        str(decoder), prompt, tmp_path / "s", texts=texts, options=replace(QUICK, share=0.25, steps=0), progress=False
    )
    assert shared.tokens == 6
    said: list[str] = []
    options = replace(QUICK, quality=0.5, steps=0)
    found = compress(
        str(decoder), prompt, tmp_path / "q", texts=texts, options=options, progress=False, say=said.append
    )
    tried = {int(size): kept for size, kept in found.record["sizes_tried"].items()}
    assert tried
    enough = [size for size, kept in tried.items() if kept is not None and kept >= 0.5]
    assert found.tokens == (min(enough) if enough else 8)
    assert len([line for line in said if line.startswith("size ")]) == len(tried)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"to": "zip"}, r"Unknown target \(--to\) 'zip'.*compact-prefix"),
        ({"size": 0}, r"size=0 .*at least 1"),
        ({"share": 1.5}, r"share=1.5 .*between 0 and 1"),
        ({"quality": 0.0}, r"quality=0 .*between 0 and 1"),
        ({"size": 3, "quality": 0.5}, r"size and quality both decide"),
        ({"to": "lora", "size": 3}, r"'lora' becomes has no size in tokens.*--to compact-prefix or cartridge"),
        ({"study": "poems"}, r"Unknown study 'poems'.*questions"),
    ],
)
def test_sizes_and_targets_that_do_not_fit(given: dict[str, Any], words: str) -> None:
    with pytest.raises(InlayError, match=words):
        Options(**given)


def test_a_size_beyond_the_prompt_is_refused(decoder: Path, tmp_path: Path) -> None:
    with pytest.raises(InlayError, match=r"size=13 \(--size\) is more than the prompt has, 12 tokens"):
        compress(str(decoder), PROMPT, tmp_path / "a", options=replace(QUICK, size=13), progress=False)
    with pytest.raises(InlayError, match=r"no closed form"):
        compress(str(decoder), PROMPT, tmp_path / "a", options=replace(QUICK, to="lora", steps=0), progress=False)


def test_a_prompt_of_two_tokens(decoder: Path, tmp_path: Path) -> None:
    found = compress(str(decoder), "w3 w4", tmp_path / "a", options=QUICK, progress=False)
    assert (found.prompt_tokens, found.tokens) == (2, 1)


def test_what_cannot_be_written_is_said_before_the_work(decoder: Path, tmp_path: Path) -> None:
    said: list[str] = []
    for settings, words in (
        ({"layers": [1]}, r"has no prefix, and a cartridge has one in every layer"),
        ({"biases": True}, r"biases=True: what --to cartridge writes has biases=False.*--to compact-prefix"),
    ):
        options = replace(QUICK, to="cartridge", settings=settings)
        with pytest.raises(InlayError, match=words):
            compress(str(decoder), PROMPT, tmp_path / "a", options=options, say=said.append)
        assert not (tmp_path / "a").exists()
    assert not any(line.startswith("scoring") for line in said)


def test_factors_that_are_asked_for_keep_their_rank() -> None:
    model = zoo.tiny("llama", "causal-lm")[0]
    for settings in ({"factored": True}, {"factored": True, "rank": 4}):
        found = Options(to=NTK, settings=settings).for_model(model, 10)
        assert (found["factored"], found["rank"]) == (True, 4)
    assert not Options(to=NTK, settings={"rank": 4}).for_model(model, 10)["factored"]


@pytest.mark.parametrize(("prompt", "size"), [("w3 w4 w5", 1), ("w3 w4 w5 w6 w7 w8", 3)])
def test_a_quality_never_takes_more_than_half_of_a_short_prompt(
    prompt: str, size: int, decoder: Path, tmp_path: Path
) -> None:
    options = replace(QUICK, quality=0.5, texts=20, steps=0)
    assert compress(str(decoder), prompt, tmp_path / "a", options=options, progress=False).tokens == size
