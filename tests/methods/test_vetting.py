"""Folders from somebody else: what they ask for is looked at before it is done, and refused in one sentence."""

from __future__ import annotations

import itertools
import json
import logging
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import BOFTConfig, LoraConfig, MultitaskPromptTuningConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor

from inlay.errors import InlayError
from inlay.methods import folder as folder_format
from inlay.methods import vetting
from inlay.methods.allowance import Allowance, TooLarge
from inlay.methods.attach import attach, restore, save, trained_parameters
from inlay.methods.folder import CONFIG, NOTE, WEIGHTS
from inlay.methods.patterns import MOST, Count, check_patterns
from inlay.methods.registry import Method, get
from inlay.methods.settings import check_settings
from probing import logits
from zoo import tiny

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
TEXT = ("lora", "prompt", "full", "linear-probe", "ntk-attention")
FAMILIES = {"vpt-deep": "vit"} | dict.fromkeys(TEXT, "bert")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a method, made once."""
    found: dict[str, Path] = {}

    def make(method: str) -> Path:
        if method not in found:
            adapted = attach(tiny(FAMILIES[method])[0], method)
            with torch.no_grad():
                for parameter in trained_parameters(adapted).values():
                    parameter.add_(torch.randn_like(parameter), alpha=0.1)
            found[method] = tmp_path_factory.mktemp("made") / method
            save(adapted, method, found[method])
        return found[method]

    return make


@pytest.fixture
def stranger(made: Callable[[str], Path], tmp_path: Path) -> Callable[..., Path]:
    """A copy without its note, with other settings."""

    def copy(method: str, **settings: Any) -> Path:
        folder = Path(shutil.copytree(made(method), tmp_path / method, dirs_exist_ok=True))
        if get(method).form != "head":
            (folder / NOTE[get(method).form]).unlink(missing_ok=True)
        if settings:
            path = folder / CONFIG[get(method).form]
            path.write_text(json.dumps(json.loads(path.read_text()) | settings))
        return folder

    return copy


def load(method: str, folder: Path) -> Any:
    return restore(tiny(FAMILIES[method])[0], method, folder)


# ---- sizes


@pytest.mark.parametrize(
    ("method", "settings", "says"),
    [
        ("lora", {"r": 10**9}, "r=1000000000: no tensor"),
        ("lora", {"r": 10**400}, "over 60 digits"),
        ("lora", {"rank_pattern": {"query": 10**9}}, "rank_pattern.query=1000000000"),
        ("lora", {"layer_replication": [[0, 3]] * 10_000}, "30,000 layers; the tensors beside it have 3"),
        ("lora", {"layer_replication": [3]}, "pairs of layers"),
        ("lora", {"lora_alpha": 1e300}, "lora_alpha=1e.300, beyond"),
        ("prompt", {"num_virtual_tokens": 10**9}, "num_virtual_tokens=1000000000"),
        ("vpt-deep", {"num_prompt_tokens": 10**9}, "num_prompt_tokens=1000000000"),
        ("ntk-attention", {"feature_multiplier": 10**9}, "feature_multiplier=1000000000"),
        ("prompt", {"num_virtual_tokens": 4000, "token_dim": 4096 * 16}, "token_dim=65536"),
        (
            "prompt",
            {"num_virtual_tokens": 4096, "token_dim": 4096, "num_transformer_submodules": 4096},
            "more than 64 MiB",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_size_that_no_tensor_has_is_not_made(
    stranger: Callable[..., Path], method: str, settings: dict[str, Any], says: str
) -> None:
    with pytest.raises(InlayError, match=says):
        load(method, stranger(method, **settings))


def test_what_is_made_by_its_size_is_counted_before_it_is_made() -> None:
    model = torch.nn.Linear(4, 4)
    for make in (
        lambda: torch.empty(10**9, 10**9),
        lambda: torch.zeros(10**15),
        lambda: torch.full((10**15,), 0.0),
        lambda: torch.arange(10**15),
        lambda: torch.eye(10**8),
        lambda: torch.randn(10**15, generator=torch.Generator()),
        lambda: torch.normal(0.0, 1.0, (10**9, 10**6)),
        lambda: model.weight.new_zeros(10**15),
        lambda: torch.nn.Linear(10**7, 10**7),
        lambda: [torch.empty(2**20) for _ in range(10**6)],
    ):
        with pytest.raises(TooLarge, match="more than 64 MiB"), Allowance.of(model, 0):
            make()
    with Allowance.of(model, 0) as allowance:
        torch.empty(1000).expand(10**9, 1000)  # no memory: the same thousand
        torch.empty(10**12, device="meta")
        assert torch.nn.Linear(8, 8).weight.isfinite().all()
    assert allowance.allowed - allowance.left < 10_000


def test_a_file_larger_than_any_adapter_of_the_model(
    stranger: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = stranger("lora")
    monkeypatch.setattr(vetting, "LARGEST_FILE", 0)
    monkeypatch.setattr(vetting, "OF_MODEL", 0)
    with pytest.raises(InlayError, match="MiB of weights; what belongs to BertForSequenceClassification"):
        load("lora", folder)


def test_the_config_of_a_whole_checkpoint_is_not_obeyed(stranger: Callable[..., Path]) -> None:
    folder = stranger("full", num_hidden_layers=10**9, vocab_size=10**9, hidden_size=10**6)
    expected = load_file(folder / WEIGHTS["full"])
    found = load("full", folder).state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


# ---- patterns

FOR_EVER = r"(\w+\.?)+!"


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": FOR_EVER},
        {"exclude_modules": FOR_EVER},
        {"rank_pattern": {FOR_EVER: 4}},
        {"alpha_pattern": {FOR_EVER: 4}},
        {"layers_pattern": FOR_EVER, "layers_to_transform": [0]},
        {"layers_pattern": [FOR_EVER], "layers_to_transform": [0]},
        {"modules_to_save": [FOR_EVER]},
        {"target_modules": ".*" * 12 + "!"},
        {"target_modules": "(a?){60}!"},
        {"target_modules": "(a+)+$"},
        {"target_modules": ".*(?<=(?:.|.|.|.){20})!"},
        {"target_modules": "((((((.*)*)*)*)*)*)*!"},
        {"target_modules": r"(.*)" + r"\1*" * 9 + "!"},
        {"rank_pattern": {f"query.{i}": 4 for i in range(20_000)}},
    ],
    ids=lambda settings: str(settings)[:40],
)
def test_a_pattern_that_could_match_for_ever_is_not_tried(
    stranger: Callable[..., Path], settings: dict[str, Any]
) -> None:
    with pytest.raises(InlayError, match="takes too long"):
        load("lora", stranger("lora", **settings))


@pytest.mark.parametrize(
    "pattern", ["(", "a" * 200_000, "(" * 2000 + ")" * 2000, "a{99999999999}", "(?P<a>x)(?P<a>y)"], ids=lambda p: p[:20]
)
def test_what_is_no_pattern(stranger: Callable[..., Path], pattern: str) -> None:
    with pytest.raises(InlayError, match="is no pattern"):
        load("lora", stranger("lora", target_modules=pattern))


UNSLOTH = (
    r"(?:.*?(?:vision|image|visual|patch|embed|language|text).*?(?:self_attn|attention|attn).*?(?:k_proj|v_proj|q_proj|"
    r"out_proj|fc1|fc2).*?)|(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|mlp)\.(?:(?:q_proj|k_proj|v_proj|o_proj|"
    r"gate_proj|up_proj|down_proj)))"
)


@pytest.mark.parametrize(
    "pattern",
    [
        r".*\.(q_proj|k_proj|v_proj|o_proj)",
        r"^(?!.*patch_embed).*(?:q_proj|k_proj|fc1|fc2|down_proj).*",
        r"model\.layers\.(1[0-9]|2[0-3])\.(self_attn|mlp)\.(.*_proj)",
        r".*decoder.*(SelfAttention|EncDecAttention).*(q|v)$",
        r"(?:language_model\.)?model\.layers\.\d+\.mlp\.experts\.\d+\.w[123]",
        "all-linear",
        ".*layer.*attention.*(query|key|value).*",
        UNSLOTH,
        r".*(?:language_model|text_model).*layers\.\d+\.(?:self_attn|mlp)\..*(?:proj).*",
        r"(?:model\.)?(?:layers\.(?:\d+)\.)+(?:self_attn\.)?(?:q|v)_proj",
        r"(?:[^.]+\.)+q_proj",
    ],
)
def test_patterns_that_people_write_are_matched(pattern: str) -> None:
    """On a model of 64 layers, as PEFT matches target modules and ranks."""
    names = [f"language_model.model.layers.{i}.self_attn.{part}_proj" for i in range(64) for part in "qkvo"]
    check_patterns({"target_modules": pattern, "rank_pattern": {"q_proj": 4, r"\d+\.v_proj": 8}}, names, "it")


def test_a_name_for_each_module_is_no_long_pattern() -> None:
    names = [f"model.layers.{i}.self_attn.{part}_proj" for i in range(140) for part in "qkvo"]
    check_patterns({"rank_pattern": dict.fromkeys(names, 4), "alpha_pattern": dict.fromkeys(names, 8)}, names, "it")


@pytest.mark.parametrize(
    "pattern",
    [
        "a*b?", "(a|ab)(c|bcd)*", r"\w+\.\d{1,3}", "[^.]*", "[a-c]+[^c]", "(?:a{2}){1,2}", ".{2,4}?b", "(?i)AB+",
        "a*?$", r"(\w)\1", "(?>a+)b", "a++b", "(?=a)ab", "(?!b)a.*", r"(?<=a)b", r"(a)?(?(1)b|c)", "", r"\D\W?\S",
    ],
)  # fmt: skip
def test_no_way_to_match_is_left_out_of_the_count(pattern: str) -> None:
    """All texts of up to four of these characters: wherever Python finds a match, a way was counted."""
    texts = ["".join(each) for length in range(5) for each in itertools.product("abcB.1", repeat=length)]
    parsed = re._parser.parse(pattern)  # type: ignore[attr-defined]
    found = 0
    for text in texts:
        if re.fullmatch(pattern, text):
            assert len(text) in Count().ways(parsed, text), (pattern, text)
            found += 1
    assert found or "<" in pattern  # a match that looks back begins later than a name does


@pytest.mark.parametrize("pattern", [".*layer.*attention.*(query|key|value).*", r"(?:(?:q+)+u+e)?.*(query|value)"])
def test_what_was_trained_is_loaded(pattern: str, tmp_path: Path) -> None:
    """By its own note; the second pattern is one that a stranger's folder may not have."""
    base, batch = tiny("bert")
    adapted = get_peft_model(base, LoraConfig(target_modules=pattern, task_type="SEQ_CLS", init_lora_weights=False))
    save(adapted, "lora", tmp_path)
    wanted = logits(adapted.eval(), batch)
    assert torch.equal(logits(load("lora", tmp_path), batch), wanted)


def test_what_could_not_be_loaded_is_not_trained() -> None:
    base, _ = tiny("bert")
    settings = {"rank_pattern": {f"query.{i}": 4 for i in range(20_000)}}
    check_settings(get("lora"), settings)  # there is no model yet
    with pytest.raises(InlayError, match="takes too long"):
        attach(base, "lora", settings=settings)
    assert not any("lora" in name for name, _ in base.named_modules())


def test_a_scale_is_no_size(stranger: Callable[..., Path]) -> None:
    folder = stranger("lora", lora_alpha=10_000, alpha_pattern={"query": 20_000})
    assert load("lora", folder).peft_config["default"].lora_alpha == 10_000


def test_patterns_that_fit_still_choose(stranger: Callable[..., Path]) -> None:
    folder = stranger("lora", target_modules=r".*attention\.self\.(query|value)", rank_pattern={"query": 8})
    wanted = logits(load("lora", stranger("lora")), tiny("bert")[1])
    assert torch.equal(logits(load("lora", folder), tiny("bert")[1]), wanted)
    assert MOST >= 1e6


# ---- files


@pytest.mark.parametrize("method", ["lora", "full", "linear-probe"])
@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_only_plain_files_are_read(stranger: Callable[..., Path], method: str, kind: str) -> None:
    folder = stranger(method)
    form = get(method).form
    for name in (WEIGHTS[form], NOTE[form], *([CONFIG[form]] if form in CONFIG else [])):
        path = folder / name
        kept = path.read_bytes() if path.exists() else None
        path.unlink(missing_ok=True)
        if kind == "pipe":
            os.mkfifo(path)
        elif kind == "device":
            path.symlink_to("/dev/zero")
        else:
            path.mkdir()
        with pytest.raises(InlayError, match=f"{name} is not a plain file"):
            load(method, folder)
        path.rmdir() if kind == "folder" else path.unlink()
        if kept is not None:
            path.write_bytes(kept)


def test_a_link_to_a_plain_file_is_as_good(made: Callable[[str], Path], tmp_path: Path) -> None:
    """As the Hub's cache has them."""
    for file in made("lora").iterdir():
        (tmp_path / file.name).symlink_to(file)
    assert torch.equal(
        logits(load("lora", tmp_path), tiny("bert")[1]), logits(load("lora", made("lora")), tiny("bert")[1])
    )


def rewrite(path: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize("method", ["lora", "full", "linear-probe"])
@pytest.mark.parametrize(
    ("dtype", "says"),
    [
        (torch.int64, "int64 numbers, the model needs float32"),
        (torch.bool, "bool numbers"),
        (torch.float8_e4m3fn, "F8_E4M3, which is not read"),
        (torch.complex64, "C64, which is not read"),
    ],
    ids=str,
)
def test_numbers_of_another_kind(stranger: Callable[..., Path], method: str, dtype: torch.dtype, says: str) -> None:
    folder = stranger(method)
    path = folder / WEIGHTS[get(method).form]
    name = next(name for name in sorted(load_file(path)) if "classifier" in name)
    rewrite(path, lambda tensors: tensors.update({name: tensors[name].to(dtype)}))
    if get(method).form == "head":
        from inlay.records.sealed import sealed

        note = json.loads((folder / "head.json").read_text()) | {"sha256": {}}
        (folder / "head.json").write_text(json.dumps(sealed(note, "digest")))
    with pytest.raises(InlayError, match=says):
        load(method, folder)


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_settings_are_finite(stranger: Callable[..., Path], value: str) -> None:
    folder = stranger("lora")
    path = folder / CONFIG["peft"]
    path.write_text(path.read_text().replace('"lora_alpha": 16', f'"lora_alpha": {value}'))
    assert value in path.read_text()
    with pytest.raises(InlayError, match="is not a finite number"):
        load("lora", folder)


def test_json_without_an_end(stranger: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = stranger("lora")
    (folder / CONFIG["peft"]).write_text('{"a":' * 100_000)
    with pytest.raises(InlayError, match="cannot be read"):
        load("lora", folder)
    monkeypatch.setattr(folder_format, "LARGEST_JSON", 1000)
    with pytest.raises(InlayError, match="bytes where at most 1,000 are read"):
        load("lora", folder)


def test_a_file_that_was_saved_and_is_gone(made: Callable[[str], Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(made("full"), tmp_path / "full"))
    (folder / "config.json").unlink()
    with pytest.raises(InlayError, match=r"has no config\.json, which was saved there"):
        load("full", folder)


# ---- trust


@pytest.mark.parametrize("method", ["lora", "full"])
def test_a_folder_without_its_note_is_loaded_with_a_word(
    made: Callable[[str], Path], stranger: Callable[..., Path], method: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="inlay.notes"):
        load(method, made(method))
        assert not caplog.records
        load(method, stranger(method))
        (said,) = caplog.records
        assert "nothing vouches for it" in said.getMessage()


def test_types_that_peft_runs_code_for_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever adds a method of that name to the registry: what PEFT does with the folder is the same."""
    config = BOFTConfig(target_modules=["query"], boft_block_size=4)
    get_peft_model(tiny("bert")[0], config).save_pretrained(tmp_path / "boft")
    monkeypatch.setattr(torch.utils.cpp_extension, "load", lambda *_, **__: pytest.fail("compiled"))
    boft = Method(name="boft", summary="", paper="", config="peft:BOFTConfig")
    with pytest.raises(InlayError, match="BOFT', which is not loaded: PEFT compiles code"):
        restore(tiny("bert")[0], boft, tmp_path / "boft")
    prompts = tmp_path / "prompts"
    prompts.mkdir()
    state = {"prompt_embeddings": torch.zeros(2, 16)}
    save_file(state, prompts / WEIGHTS["peft"], metadata={"format": "pt"})
    MultitaskPromptTuningConfig(
        num_virtual_tokens=2,
        task_type="SEQ_CLS",
        prompt_tuning_init="ONLY_SOURCE_SHARED",
        prompt_tuning_init_state_dict_path="evil.bin",
    ).save_pretrained(prompts)
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("unpickled"))
    multitask = Method(name="mpt", summary="", paper="", config="peft:MultitaskPromptTuningConfig")
    with pytest.raises(InlayError, match="name a file that PEFT unpickles"):
        restore(tiny("bert")[0], multitask, prompts)


def test_no_module_is_imported_that_a_folder_names(stranger: Callable[..., Path]) -> None:
    folder = stranger("lora", megatron_config={"a": 1}, megatron_core="megatron.evil")
    with pytest.raises(InlayError, match="megatron_config, which is not loaded"):
        load("lora", folder)
