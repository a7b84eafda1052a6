"""Adapters that come and go with their folders while a service runs.

What is new is read and checked beside the running service; between two batches it is put into the model. A folder that
cannot be used is remembered with the reason, and the others go on.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from inlay.errors import InlayError, first_line
from inlay.methods.folder import CONFIG, TASKS
from inlay.serve.refusals import Refusal

logger = logging.getLogger("inlay.serve")
STOPPING = 503
EVERY = 1.0  # seconds between two looks at the folders
Stamp = tuple[tuple[str, int, int, int], ...]
Do = Callable[[Callable[[], Any]], Any]
Change = Callable[[Callable[[], Any]], Future[Any]]


class Watched:
    """What is served from folders, by name. Whoever inherits says where they lie and how one is looked at and put in.

    `served` has what is served, each with the `stamp` of its folder when it was read; `refused` the stamp and the
    reason of each that cannot be.
    """

    what: str  # such as prompt

    def __init__(self) -> None:
        self.served: dict[str, Any] = {}
        self.refused: dict[str, tuple[Stamp, str]] = {}
        self.changing = threading.Lock()  # held while what is served changes
        self._seen: dict[str, Stamp] = {}

    @property
    def twice(self) -> list[tuple[str, str]]:
        """Names of which there is another already, and the reason."""
        return []

    # ---- said by whoever inherits

    def describe(self) -> dict[str, Any]:
        """The model, what is served, and what is not."""
        raise NotImplementedError

    def missing(self, task: str) -> Refusal | None:
        """Why rows of this name are not answered; None where they are."""
        raise NotImplementedError

    def answer(self, requests: Sequence[Any]) -> list[dict[str, Any]]:
        """An answer to each request, in order."""
        raise NotImplementedError

    def _places(self) -> dict[str, Path] | None:
        """The folders that may hold one, by name; None where that cannot be known now."""
        raise NotImplementedError

    def _look(self, name: str) -> Any:
        """What a folder holds; an `InlayError` says why it cannot be served."""
        raise NotImplementedError

    def _put(self, name: str, found: Any) -> None:
        """Between two batches: serve it, in place of an earlier one of its name."""
        raise NotImplementedError

    def _remove(self, name: str) -> None:
        """Between two batches: serve it no longer."""
        raise NotImplementedError

    # ---- the folders

    @contextmanager
    def watched(self, change: Change, every: float = EVERY) -> Iterator[None]:
        """Look at the folders again and again while the block lasts; `change` does something between two batches."""
        over = threading.Event()

        def watch() -> None:
            while not over.wait(every):
                try:
                    with self.changing:
                        self.look_again(lambda action: change(action).result())
                except Refusal as error:
                    if error.status == STOPPING:
                        return
                    logger.warning("the folder of %ss: %s", self.what, error)
                except Exception:
                    logger.exception("the folder of %ss could not be looked at", self.what)

        thread = threading.Thread(target=watch, name=f"inlay-{self.what}s", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def look_again(self, do: Do) -> None:
        """Take in what has come and let go what has gone. A folder counts once it has looked the same twice: it may
        be in the middle of being copied."""
        found = self._stamps()
        if found is None:
            return
        before, self._seen = self._seen, found
        for name in self.served.keys() - found.keys():
            do(partial(self._remove, name))
            logger.info("%s %s is gone", self.what, name)
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
                logger.info("%s %s is served", self.what, name)

    def _stamps(self) -> dict[str, Stamp] | None:
        """What tells each folder from an earlier one of its name; None where the folders cannot be read."""
        places = self._places()
        if places is None:
            return None
        found = {name: self._stamp(place) for name, place in places.items()}
        return {name: stamp for name, stamp in found.items() if stamp is not None}

    def _stamp(self, place: Path) -> Stamp | None:
        """What tells a folder from an earlier one of its name; None where it holds no adapter."""
        try:
            if any((place / name).is_file() for name in (CONFIG["peft"], TASKS)):
                files = [(file.name, file.stat()) for file in sorted(place.iterdir())]
                return tuple((name, s.st_mtime_ns, s.st_size, s.st_ino) for name, s in files)
        except OSError:
            pass  # gone while it was looked at
        return None

    def _children(self, folder: Path) -> dict[str, Path] | None:
        """What lies in a folder, by name; None where it cannot be read."""
        try:
            places = (place for place in sorted(folder.iterdir()) if not place.name.startswith("."))
            return {place.name: place for place in places if place.name.isprintable()}  # names go into lines of logs
        except OSError as error:
            logger.warning("the folder of %ss cannot be read: %s", self.what, error)
            return None

    def _looked_at(self, name: str) -> Any:
        """What a folder holds; None where it cannot be served, and then the reason is kept."""
        found: list[Any] = []
        self._try(name, lambda: found.append(self._look(name)))
        return found[0] if found else None

    def _take(self, name: str, found: Any, do: Do) -> None:
        if self._try(name, lambda: do(lambda: self._put(name, found))):
            self.refused.pop(name, None)

    def _try(self, name: str, action: Callable[[], Any]) -> bool:
        """Whether something could be done; where not, the reason is kept: whatever it is, the others go on."""
        try:
            action()
        except InlayError as error:
            if isinstance(error, Refusal) and error.status == STOPPING:
                raise
            self._refuse(name, str(error))
            return False
        except Exception as error:
            logger.exception("%s %s could not be read", self.what, name)
            self._refuse(name, f"It could not be read ({type(error).__name__}: {first_line(error)}).")
            return False
        return True

    def _refuse(self, name: str, why: str) -> None:
        self.refused[name] = (self._seen[name], why)
        logger.warning("%s %s is not served: %s", self.what, name, why)
