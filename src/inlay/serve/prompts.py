"""One model and many compressed prompts: adapters that stand for prompts, from the folders below one folder.

Prompts come and go with their folders (watching.py).
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inlay.backbones.locate import portable
from inlay.errors import InlayError, first_line, misspelt
from inlay.methods.folder import CONFIG
from inlay.serve.refusals import Refusal, unknown_prompt
from inlay.serve.watching import Stamp, Watched

if TYPE_CHECKING:
    from inlay.workflow.generation import Continuation, Sampling
    from inlay.workflow.prompt_folders import PromptAdapter

NO_PROMPT = ""  # the name of the model alone: no folder is called so
RESTING = "no_prompt"  # the adapter that no row has: a PEFT model must have one


@dataclass(frozen=True, eq=False)
class PromptRow:
    """A text to be continued behind a prompt; `task` is the prompt's name."""

    task: str
    row: Continuation


@dataclass(frozen=True)
class ServedPrompt:
    """A prompt that is served: its folder as it was when it was read, and the adapter's name in the model."""

    adapter: PromptAdapter
    stamp: Stamp
    name: str


class Prompts(Watched):
    """A model with the prompts of a folder, mixed in one pass."""

    what = "prompt"
    served: dict[str, ServedPrompt]

    def __init__(self, folder: Path, *, model: str | None = None, trust_remote_code: bool = False) -> None:
        from inlay.methods import attach
        from inlay.tasks import kinds
        from inlay.workflow.prompt_folders import find_base, mixing_method, open_writer

        super().__init__()
        self.folder = folder
        check_folder(folder)
        self.method = mixing_method()
        self._numbers = count(1)
        self._seen = self._stamps() or {}
        self._encoding = threading.Lock()
        found = {name: adapter for name in self._seen if (adapter := self._looked_at(name)) is not None}
        if model is None:
            model = find_base(self._usual(list(found.values())))
        self.writer = open_writer(model, trust_remote_code=trust_remote_code)
        self.writer.model = attach.attach(
            self.writer.model, self.method, adapter_name=RESTING, newly_initialised=[], task_kind=kinds.CAUSAL_LM
        ).requires_grad_(False)
        self.writer.model.to(self.writer.place.device).eval()
        for name, adapter in found.items():
            self._take(name, adapter, lambda action: action())

    # ---- what the queue asks

    def missing(self, task: str) -> Refusal | None:
        return None if task == NO_PROMPT or task in self.served else unknown_prompt(task, self.served)

    def answer(self, requests: Sequence[PromptRow]) -> list[dict[str, Any]]:
        for each in requests:
            if each.row.written:  # a batch that failed is tried again in halves
                each.row.again()
            each.row.prompt = None if each.task == NO_PROMPT else self.served[each.task].name
        self.writer.write([each.row for each in requests])
        return [
            {
                "prompt": each.task or None,
                "text": each.row.text,
                "tokens": len(each.row.written),
                "finish": each.row.finish,
            }
            for each in requests
        ]

    # ---- what the application asks

    def begin(
        self, prompt: str | None, text: str, sampling: Sampling, tell: Callable[[str], None] | None = None
    ) -> PromptRow:
        """A request that can be queued; a `Refusal` says what is wrong with it."""
        from inlay.workflow.generation import TooLong

        if prompt is not None and prompt not in self.served:
            raise unknown_prompt(prompt, self.served)
        name = NO_PROMPT if prompt is None else prompt
        try:
            with self._encoding:  # a tokenizer is for one thread at a time
                return PromptRow(name, self.writer.begin(text, sampling, tell=tell))
        except TooLong as error:
            raise Refusal(413, str(error)) from None
        except InlayError as error:
            raise Refusal(400, str(error)) from None

    def describe(self) -> dict[str, Any]:
        """The model, what is served, and what is not."""
        return {
            "model": portable(self.writer.name),
            "context": self.writer.context,
            "prompts": [{"prompt": name, **each.adapter.describe()} for name, each in sorted(self.served.items())],
            "refused": [{"prompt": name, "error": why} for name, (_, why) in sorted(self.refused.items())],
        }

    # ---- the folder

    def _places(self) -> dict[str, Path] | None:
        return self._children(self.folder)

    def _look(self, name: str) -> PromptAdapter:
        from inlay.methods.saving import read
        from inlay.workflow.prompt_folders import look, mixes_rows

        adapter = look(self.folder / name)
        if not mixes_rows(adapter.method):
            raise InlayError(
                f"{name} is an adapter of {adapter.method.name!r}, which is not mixed with others in a batch: "
                f"`inlay chat --adapter` runs it. `inlay compress --to {self.method.name}` makes one that is."
            )
        read(adapter.method, adapter.place, name)  # whole, finite, and what its note says
        return adapter

    def _put(self, name: str, adapter: PromptAdapter) -> None:
        """Between two batches: under a new name first, so that an earlier prompt of the name goes only for this one."""
        from inlay.workflow.prompt_folders import put_in

        within = f"prompt_{next(self._numbers)}"
        put_in(adapter, self.writer, within)
        earlier = self.served.get(name)
        self.served[name] = ServedPrompt(adapter, self._seen[name], within)
        if earlier is not None:
            self.writer.model.delete_adapter(earlier.name)

    def _remove(self, name: str) -> None:
        self.writer.model.delete_adapter(self.served.pop(name).name)

    def _usual(self, found: list[PromptAdapter]) -> PromptAdapter:
        """An adapter of the base model that most have."""
        if not found:
            reasons = "; ".join(f"{name}: {first_line(Exception(why))}" for name, (_, why) in self.refused.items())
            raise InlayError(
                f"{self.folder} holds no prompt that can be served ({reasons or 'it has no folder with an adapter'}). "
                "`inlay compress --out` writes them, each into a folder of its own below it; with --model the service "
                "starts without one, and waits for them."
            )
        (usual, _), *_ = Counter(each.fingerprint for each in found).most_common()
        return next(each for each in found if each.fingerprint == usual)


def check_folder(folder: Path) -> None:
    """An error for what is no folder of adapter folders."""
    if not folder.is_dir():
        raise InlayError(f"--prompts {str(folder)!r} is no folder.{misspelt(folder)} Give one of adapter folders.")
    if (folder / CONFIG["peft"]).is_file():
        raise InlayError(
            f"--prompts {str(folder)!r} is one adapter itself: give the folder that it lies in. Each folder below that "
            "is a prompt, by its name."
        )
