"""The Hub: a folder put there as one commit, and one fetched from there. Each failure is one error with its next step.

Who asks is known by `hf auth login` or HF_TOKEN alone: no token is an argument here, is printed, or is written.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from inlay.console import has_colour
from inlay.errors import InlayError, first_line

REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
EMPTY = {".gitattributes"}  # what a new repository has
# What is written and read: text and safetensors. No pickle and no code.
PATTERNS = ("*.safetensors", "*.json", "*.md", "*.txt", "*.model", "*.jinja")
LOGIN = "log in with `hf auth login`, or set HF_TOKEN"


def check_repository(name: str) -> None:
    """An error for what is no name of a repository."""
    if REPOSITORY.fullmatch(name) is None or len(name) > 96 or ".." in name or "--" in name:
        raise InlayError(f"{name!r} is no repository of the Hub: give owner/name, as in me/reviews-lora.")


def publish(folder: Path, repository: str, *, private: bool, update: bool, message: str) -> str:
    """Put the files of a folder into a repository, as one commit; its address. A repository that has files already is
    changed only where `update` says so."""
    from huggingface_hub import HfApi

    check_repository(repository)
    with _told(repository, "pushed"), _bars():
        api = HfApi()
        created = api.create_repo(repository, private=private, exist_ok=True)
        held = sorted(set(api.list_repo_files(repository)) - EMPTY)
        if held and not update:
            raise InlayError(
                f"{repository} is there already, with {len(held)} files ({', '.join(held[:3])} ...). Give --update to "
                "write over those of the same names, or another name."
            )
        api.upload_folder(repo_id=repository, folder_path=folder, commit_message=message)
    return str(created)


def fetch(repository: str, revision: str | None, place: Path) -> str:
    """Copy a repository's text and safetensors into an empty folder; the commit."""
    from huggingface_hub import snapshot_download

    check_repository(repository)
    with _told(repository, "pulled"), _bars():
        found = Path(snapshot_download(repository, revision=revision, allow_patterns=[*PATTERNS]))
    for file in sorted(found.rglob("*")):
        if file.is_file():
            target = place / file.relative_to(found)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target)
    return found.name


@contextmanager
def _bars() -> Iterator[None]:
    """Progress bars of the Hub where a terminal may be steered, and nowhere else."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    shown = not are_progress_bars_disabled()
    if not has_colour(sys.stderr):
        disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            enable_progress_bars()


@contextmanager
def _told(repository: str, done: str) -> Iterator[None]:
    """Every failure of the Hub as one `InlayError`."""
    from huggingface_hub import constants, is_offline_mode
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalTokenNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    nothing = f"{repository} was not {done}"
    if done == "pushed" and is_offline_mode():
        raise InlayError(
            f"{nothing}: HF_HUB_OFFLINE is set. Unset it, or write the folder that would be pushed: --out FOLDER."
        )
    try:
        yield
    except InlayError:
        raise
    except HFValidationError as error:
        raise InlayError(f"{nothing}: {first_line(error)}") from None
    except LocalTokenNotFoundError:
        raise InlayError(f"{nothing}: nobody is logged in. To push, {LOGIN}.") from None
    except GatedRepoError:
        raise InlayError(f"{nothing}: it is gated. Accept its terms on its page, then {LOGIN}.") from None
    except RevisionNotFoundError:
        raise InlayError(f"{nothing}: it has no such revision. Give a branch, a tag or a commit of it.") from None
    except RepositoryNotFoundError:
        raise InlayError(
            f"{nothing}: there is none of this name that you may read. Check the spelling; if it is private, {LOGIN}."
        ) from None
    except HfHubHTTPError as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status in (401, 403):
            raise InlayError(
                f"{nothing}: you may not (HTTP {status}). Write under your own name, and {LOGIN}."
            ) from None
        raise InlayError(f"{nothing}: the Hub answered HTTP {status} ({first_line(error)}). Try again later.") from None
    except Exception as error:  # whatever the HTTP client of this version raises when nobody answers
        if is_offline_mode():
            raise InlayError(
                f"{nothing}: HF_HUB_OFFLINE is set, and the Hub's cache has no whole copy of it. Unset it."
            ) from None
        instead = " --out FOLDER writes what would be pushed." if done == "pushed" else ""
        raise InlayError(
            f"{nothing}: {constants.ENDPOINT} could not be reached ({type(error).__name__}: {first_line(error)}). "
            f"Check the network and HF_ENDPOINT.{instead}"
        ) from None
