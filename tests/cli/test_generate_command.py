"""`inlay generate` as it is typed: a run, an adapter and a model alone; one text, standard input, files."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from inlay import Spec, tune
from inlay.workflow.predict import predict
from prompted import adapter, decoder
from pseudo_terminal import NARROW, type_in

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
HOW = ("--max-tokens", "6")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny decoder, an adapter that stands for a prompt, and a run on prompts and answers."""
    folder = tmp_path_factory.mktemp("place")
    model = decoder(folder / "decoder")
    adapter(model, folder / "compressed", 4)
    lines = [{"question": f"w{n} w{n + 1}", "reply": f"w{n + 2} w{n + 3}"} for n in range(3, 23)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    spec = Spec(
        model=str(model), data=str(folder / "pairs.jsonl"), kind="causal-lm", text=("question",), label="reply",
        template="w1 {question} w2", method="lora", max_steps=30, learning_rate=0.05,
    )  # fmt: skip
    (folder / "run").write_text(str(tune(spec, folder / "runs", progress=False).folder))
    return folder


@pytest.fixture(autouse=True)
def here(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INLAY_CACHE", str(place / "cache"))


def lines(out: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in out.splitlines()]


def test_a_run_writes_what_it_predicts(typed, place: Path) -> None:
    run, asked = (place / "run").read_text(), ["w4 w5", "w9 w10"]
    rows = predict(run, [{"question": text} for text in asked])
    fits = ("--max-tokens", "10")  # as many as `predict` writes in half of the tokenizer's 20
    status, out, err = typed("generate", "--run", run, *asked, *fits)
    assert status == 0, err
    assert [row["text"].strip() for row in lines(out)] == [row["text"] for row in rows]  # type: ignore[attr-defined]
    assert [row["question"] for row in lines(out)] == asked
    status, one, err = typed("generate", "--run", run, asked[1], *fits)
    assert status == 0, err
    assert one.strip() == rows[1]["text"]
    status, _, err = typed("generate", "--run", run, "--input", place / "pairs.jsonl", *HOW, "--output", "a.jsonl")
    assert status == 0, err
    assert "20 texts in a.jsonl" in err
    written = lines(Path("a.jsonl").read_text())
    assert len(written) == 20
    assert set(written[0]) == {"question", "reply", "text", "tokens", "finish"}


def test_a_batch_is_each_text_by_itself(typed, place: Path) -> None:
    folder = Path("texts.txt")
    folder.write_text("w3 w5\n\nw7 w8 w9 w10\nw6\n")
    how = ("--model", str(place / "decoder"), "--temperature", "1.2", "--seed", "7", *HOW)
    status, out, err = typed("generate", *how, "--input", folder)
    assert status == 0, err
    assert [row["prompt"] for row in lines(out)] == ["w3 w5", "w7 w8 w9 w10", "w6"]
    status, slow, err = typed("generate", *how, "--input", folder, "--batch-size", "1")
    assert (status, slow) == (0, out), err
    status, other, _ = typed("generate", *how[:-3], "8", *HOW, "--input", folder)
    assert status == 0
    assert other != out
    assert {row["finish"] for row in lines(out)} <= {"end", "length"}


def test_standard_input_and_an_adapter(typed, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("w3 w5\n"))
    how = ("--adapter", place / "compressed", "--model", place / "decoder", *HOW)
    status, out, err = typed("generate", *how, "-")
    assert status == 0, err
    status, same, err = typed("generate", *how, "w3 w5")
    assert (status, same) == (0, out), err
    status, bare, err = typed("generate", "--model", place / "decoder", *HOW, "w3 w5")
    assert status == 0, err
    assert bare != out


def test_the_chat_template_makes_a_text_a_message(typed, place: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    template = "<s> {% for m in messages %}w2 {{ m['content'] }} w30 {% endfor %}w21 "
    model = decoder(tmp_path / "chatty", chat_template=template)
    status, out, err = typed("generate", "--model", model, *HOW, "--chat-template", "w3 w5")
    assert status == 0, err
    tokenizer, plain = AutoTokenizer.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model).eval()
    ids = tokenizer("<s> w2 w3 w5 w30 w21", add_special_tokens=False, return_tensors="pt").input_ids
    made = plain.generate(input_ids=ids, do_sample=False, max_new_tokens=6, pad_token_id=1)
    assert out.strip() == tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True)


def test_stop_strings_end_a_text_before_them(typed, place: Path) -> None:
    how = ("--model", place / "decoder", "--max-tokens", "12", "--json", "w3 w5")
    (whole,) = lines(typed("generate", *how)[1])
    words = str(whole["text"]).split()
    assert len(words) > 5
    stop = " ".join(words[3:5])
    status, out, err = typed("generate", *how, "--stop", "nothing", "--stop", stop)
    assert status == 0, err
    (cut,) = lines(out)
    assert cut["finish"] == "stop"
    assert str(whole["text"]).startswith(str(cut["text"]))
    assert str(cut["text"]) == str(whole["text"]).partition(stop)[0]
    status, told, err = typed("generate", *how[:4], "w3 w5", "--stop", stop)
    assert (status, told.rstrip("\n")) == (0, cut["text"]), err


def test_a_terminal_sees_it_while_it_is_written(place: Path) -> None:
    seen = type_in(NARROW, "generate", "--model", str(place / "decoder"), "--max-tokens", "30", "w3 w5")
    assert seen.status == 0, seen.err
    piped = type_in(NARROW, "generate", "--model", str(place / "decoder"), "--max-tokens", "30", "--json", "w3 w5")
    assert seen.out.split() == json.loads(piped.out)["text"].split()
    assert len(seen.out.splitlines()) > 1, "folded to the terminal"
    assert max(map(len, seen.out.splitlines())) <= 60


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("w3",), "Give what is to write"),
        (("--model", "decoder"), "Give texts"),
        (("--model", "decoder", "w3", "--field", "x"), "names a column of a table"),
        (("--model", "decoder", "w3 " * 50), "reads 40 in all"),
        (("--model", "decoder", "w3", "w3 " * 50), "Text 2: "),
        (("--model", "decoder", "w3", "--temperature", "-1"), "temperature=-1"),
        (("--model", "decoder", "w3", "--stop", ""), "stop=''"),
        (("--model", "decoder", "w3", "--chat-template"), "has no chat template: leave --chat-template out"),
        (("--model", "decoder", "--input", "pairs.jsonl"), "no column 'prompt' or 'text': name one with --field"),
        (("--model", "decoder", "--input", "pairs.jsonl", "--field", "quesion"), "Did you mean 'question'"),
        (("--model", "decoder", "--run", "x", "--adapter", "y", "w3"), "Give --run or --adapter, not both"),
        (("--model", "decoder", "--task", "x", "w3"), "give --run, or leave it out"),
        (("--model", "decoder", "--input", "none.txt"), "There is no file 'none.txt'"),
    ],
)  # fmt: skip
def test_mistakes(words: tuple[str, ...], message: str, typed, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    words = tuple("./decoder" if word == "decoder" else word for word in words)
    status, out, err = typed("generate", *words)
    assert (status, out) == (2, "")
    assert message in err


def test_a_run_that_writes_nothing_is_refused(typed, review_spec: Spec) -> None:
    run = tune(review_spec.with_(max_steps=1), "runs", progress=False)
    status, _, err = typed("generate", "--run", run.folder, "w3")
    assert status == 2
    assert "is of kind 'classification' and writes no texts" in err
