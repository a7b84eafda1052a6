"""The LoRAs of one model, mixed in one pass: put in and taken out by name, run and let write.

The rest of the service knows nothing else of them, so that another way of keeping them can stand in this place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from inlay.errors import InlayError, unknown
from inlay.methods.mixing import BASE
from inlay.methods.plain import WRAPPED, base_of
from inlay.tasks import kinds
from inlay.training.batches import Placement
from inlay.training.plan import pick_device, pick_dtype
from inlay.workflow.generation import Continuation, Writer

if TYPE_CHECKING:
    from inlay.backbones.loading import Backbone

RESTING = "resting"  # the adapter that no row has: a PEFT model must have one


class LoraWriter(Writer):
    """Lets the model write. Rows may always have different adapters; `encode_with` gives the tokenizer of a thread."""

    encode_with: Callable[[], Any] | None = None

    @property
    def mixes(self) -> bool:
        return True

    def encode(self, text: str) -> list[int]:
        tokenizer = self.tokenizer if self.encode_with is None else self.encode_with()
        return list(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)


class LoraSet:
    """LoRAs by name, in one base model that is loaded once. All but `names` is for one thread at a time."""

    def __init__(self, backbone: Backbone, head: kinds.Head) -> None:
        from peft import LoraConfig, get_peft_model

        from inlay.methods.mixture.lora import mix

        base = backbone.model
        first = next(name for name, module in base.named_modules() if _is_linear(name, module))
        # Only a language model needs PEFT's own class, to write: that of a classifier would give every adapter a head.
        config = LoraConfig(task_type=head.task_type if head is kinds.LANGUAGE else None, r=1, target_modules=[first])
        self._within: dict[str, str] = {}
        self._numbers = count(1)
        self._states: Tensor | None = None
        # Some language models call what is inside their trunk.
        trunk = base.get_decoder() if head is kinds.LANGUAGE else getattr(base, base.base_model_prefix)
        # First of its hooks: the states as they are, before a pooling is put in their place.
        trunk.register_forward_hook(self._remember, prepend=True)
        self.model: Any = mix(get_peft_model(base, config, adapter_name=RESTING)).requires_grad_(False)
        self.writer: LoraWriter | None = None
        if head is kinds.LANGUAGE:
            backbone.model = self.model
            self.writer = LoraWriter(backbone)
            self.place = self.writer.place
        else:
            device = pick_device()
            self.place = Placement(device, pick_dtype("auto", device, strict=False), 1)
        self.model.to(self.place.device).eval()
        self._more = {"logits_to_keep": 1} if self.writer is not None and _keeps_few(base) else {}

    @property
    def names(self) -> list[str]:
        """The adapters that are there."""
        return list(self._within)

    @property
    def base(self) -> Any:
        """The base model without its adapters."""
        return base_of(self.model)

    def add(self, name: str, source: Path | str, revision: str | None = None) -> None:
        """Put an adapter in, from a folder or the hub; in place of an earlier one of the name, which goes only then."""
        from inlay.console import quiet
        from inlay.methods.mixture.lora import unmixable

        # All of one length: PEFT tells adapters apart by what their names hold.
        within = f"served_{next(self._numbers):06d}"
        how = {} if revision is None else {"revision": revision}
        try:
            with quiet():  # PEFT warns of every further adapter in one model
                self.model.load_adapter(str(source), within, torch_device=str(self.place.device), **how)
            self.model.requires_grad_(False).eval()
            if (why := unmixable(self.model.base_model, within)) is not None:
                raise InlayError(f"{source} cannot be mixed with others in one pass: {why}.")
            self._check_whole(within, source)
        except BaseException as error:
            if within in self.model.peft_config:
                self.model.delete_adapter(within)
            cause = error.__cause__ if isinstance(error, InlayError) and error.__cause__ is not None else error
            if isinstance(cause, ValueError | KeyError | RuntimeError) and not isinstance(cause, InlayError):
                raise InlayError(
                    f"{source} does not fit {type(self.base).__name__}: {_told(cause, within)} Is it of this base "
                    "model?"
                ) from error
            raise
        earlier = self._within.get(name)
        self._within[name] = within
        if earlier is not None:
            self.model.delete_adapter(earlier)

    def remove(self, name: str) -> None:
        """Take an adapter out."""
        if name not in self._within:
            raise unknown("adapter", name, self._within)
        self.model.delete_adapter(self._within.pop(name))

    def run(self, batch: Mapping[str, Tensor], names: Sequence[str | None]) -> tuple[Tensor, Tensor]:
        """One pass of rows with these adapters (None: the model alone): the logits, and the trunk's last states."""
        rows = [BASE if name is None else self._within[name] for name in names]
        given = {key: value.to(self.place.device) for key, value in batch.items()}
        try:
            with torch.no_grad(), self.place.autocast():
                logits = self.model(**given, **self._more, adapter_names=rows)["logits"]
            assert self._states is not None
            return logits, self._states
        finally:
            self._states = None

    def generate(self, rows: Sequence[Continuation], names: Sequence[str | None]) -> None:
        """Continue texts to their ends in one pass, each with its adapter (None: the model alone)."""
        assert self.writer is not None
        for row, name in zip(rows, names, strict=True):
            row.prompt = None if name is None else self._within[name]
        try:
            self.writer.write(rows)
        finally:
            self._states = None

    def _remember(self, module: nn.Module, args: Any, output: Any) -> None:
        self._states = output[0]

    def _check_whole(self, within: str, source: Path | str) -> None:
        """PEFT warns of tensors that are missing or left over, and goes on: here they are an error."""
        from peft.utils.save_and_load import get_peft_model_state_dict

        from inlay.methods import vetting
        from inlay.methods.folder import WEIGHTS
        from inlay.methods.pooling_notes import find_file
        from inlay.methods.saving import compare

        path = find_file(str(source), WEIGHTS["peft"], {})
        if path is not None:
            expected = get_peft_model_state_dict(self.model, adapter_name=within, save_embedding_layers=False)
            compare(vetting.read_shapes(path), expected, Path(source))


def _is_linear(name: str, module: nn.Module) -> bool:
    return (isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D") and "." in name


def _told(error: BaseException, within: str) -> str:
    """What torch or PEFT says, without their first line, which says only that there was an error."""
    said = str(error)
    for ours in (f".{within}", ".modules_to_save", WRAPPED):
        said = said.replace(ours, "")
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return " ".join(lines[1:3] or lines) or type(error).__name__


def _keeps_few(base: Any) -> bool:
    """Whether the logits of the last token alone can be asked for: those of all would be many numbers for nothing."""
    import inspect

    return "logits_to_keep" in inspect.signature(base.forward).parameters
