"""One model and many compressed prompts: adapters that stand for prompts, from the folders below one folder.

Prompts come and go with their folders. What is new is read and checked beside the running service; between two batches
it is put into the model. A folder that cannot be used is remembered with the reason, and the others go on.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inlay.backbones.locate import portable
from inlay.errors import InlayError, first_line, misspelt
from inlay.methods.folder import CONFIG
from inlay.serve.refusals import Refusal, unknown_prompt

if TYPE_CHECKING:
    from inlay.workflow.generation import Continuation, Sampling
    from inlay.workflow.prompt_folders import PromptAdapter

logger = logging.getLogger("inlay.serve")
NO_PROMPT = ""  # the name of the model alone: no folder is called so
RESTING = "no_prompt"  # the adapter that no row has: a PEFT model must have one
STOPPING = 503
EVERY = 1.0  # seconds between two looks at the folder
Stamp = tuple[tuple[str, int, int, int], ...]


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


class Prompts:
    """A model with the prompts of a folder, mixed in one pass."""

    def __init__(self, folder: Path, *, model: str | None = None, trust_remote_code: bool = False) -> None:
        from inlay.methods import attach
        from inlay.tasks import kinds
        from inlay.workflow.prompt_folders import find_base, mixing_method, open_writer

        self.folder = folder
        check_folder(folder)
        self.served: dict[str, ServedPrompt] = {}
        self.refused: dict[str, tuple[Stamp, str]] = {}
        self.method = mixing_method()
        self._numbers = count(1)
        self._seen: dict[str, Stamp] = self._stamps() or {}
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

    @contextmanager
    def watched(self, change: Callable[[Callable[[], Any]], Future[Any]], every: float = EVERY) -> Iterator[None]:
        """Look at the folder again and again while the block lasts; `change` does something between two batches."""
        over = threading.Event()

        def watch() -> None:
            while not over.wait(every):
                try:
                    self.look_again(lambda action: change(action).result())
                except Refusal as error:
                    if error.status == STOPPING:
                        return
                    logger.warning("the folder of prompts: %s", error)
                except Exception:
                    logger.exception("the folder of prompts could not be looked at")

        thread = threading.Thread(target=watch, name="inlay-prompts", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def look_again(self, do: Callable[[Callable[[], Any]], Any]) -> None:
        """Take in what has come and let go what has gone. A folder counts once it has looked the same twice: it may
        be in the middle of being copied."""
        found = self._stamps()
        if found is None:
            return
        before, self._seen = self._seen, found
        for name in self.served.keys() - found.keys():
            do(partial(self._remove, name))
            logger.info("prompt %s is gone", name)
        for name in self.refused.keys() - found.keys():
            del self.refused[name]
        for name, stamp in found.items():
            known = self.served[name].stamp if name in self.served else None
            refused = self.refused[name][0] if name in self.refused else None
            if before.get(name) != stamp or stamp in (known, refused):
                continue
            if (adapter := self._looked_at(name)) is not None:
                self._take(name, adapter, do)
            if name in self.served and self.served[name].stamp == stamp:
                logger.info("prompt %s is served", name)

    def _stamps(self) -> dict[str, Stamp] | None:
        """What tells each adapter folder from an earlier one of its name; None where the folder cannot be read."""
        found: dict[str, Stamp] = {}
        try:
            places = sorted(self.folder.iterdir())
        except OSError as error:
            logger.warning("the folder of prompts cannot be read: %s", error)
            return None
        for place in places:
            if place.name.startswith("."):
                continue
            try:
                if (place / CONFIG["peft"]).is_file():
                    files = [(file.name, file.stat()) for file in sorted(place.iterdir())]
                    found[place.name] = tuple((name, s.st_mtime_ns, s.st_size, s.st_ino) for name, s in files)
            except OSError:
                continue  # gone while it was looked at
        return found

    def _looked_at(self, name: str) -> PromptAdapter | None:
        """What a folder holds; None where it cannot be served, and then the reason is kept."""
        from inlay.methods.saving import read
        from inlay.workflow.prompt_folders import look, mixes_rows

        try:
            adapter = look(self.folder / name)
            if not mixes_rows(adapter.method):
                raise InlayError(
                    f"{name} is an adapter of {adapter.method.name!r}, which is not mixed with others in a batch: "
                    f"`inlay chat --adapter` runs it. `inlay compress --to {self.method.name}` makes one that is."
                )
            read(adapter.method, adapter.place, name)  # whole, finite, and what its note says
        except InlayError as error:
            self._refuse(name, str(error))
            return None
        return adapter

    def _take(self, name: str, adapter: PromptAdapter, do: Callable[[Callable[[], Any]], Any]) -> None:
        try:
            do(lambda: self._put(name, adapter))
        except InlayError as error:
            if isinstance(error, Refusal) and error.status == STOPPING:
                raise
            self._refuse(name, str(error))
            return
        self.refused.pop(name, None)

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

    def _refuse(self, name: str, why: str) -> None:
        self.refused[name] = (self._seen[name], why)
        logger.warning("prompt %s is not served: %s", name, why)

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
