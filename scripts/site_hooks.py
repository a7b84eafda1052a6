"""What MkDocs does not know of this repository: pages made by programs, links that leave docs/, and equations.

`mkdocs.yml` names this file. Nothing here writes into the checkout.

- The start page is README.md; the changelog, CONTRIBUTING.md and other Markdown files beside it become pages.
- Tutorials are the notebooks, with what they gave where they have been run.
- Reference is made of the code, Benchmarks of benchmarks/results.
- A link to a file outside of docs/ leads to a copy on the site: a page that shows the code, or the file itself.
- An equation ($...$, $$...$$) becomes MathML, which browsers draw without a script or a font of ours.
"""

from __future__ import annotations

import html
import posixpath
import re
import sys
from pathlib import Path

import latex2mathml.converter
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(Path(__file__).parent))

import site_notebooks  # noqa: E402
from site_benchmarks import benchmarks_page  # noqa: E402
from site_reference import api_page, cli_page  # noqa: E402

LINK = re.compile(r"(\]\(|(?:src|href)=\")([^)\s\"]+)(?=[)\s\"])")
EQUATION = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)
BESIDE = {"README.md": "index.md", "docs/README.md": "index.md"}
CODE = {".py": "python", ".toml": "toml", ".yaml": "yaml", ".yml": "yaml", ".cff": "yaml", ".sh": "bash", "": "text"}
LISTED = {"benchmarks": "reference/benchmarks.md", "notebooks": "tutorials/index.md"}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Every page has a place: those that the list leaves out go to the end of their section."""
    sections = {name: pages for entry in config.nav for name, pages in entry.items()}
    listed = set(_pages(config.nav))
    docs = Path(config.docs_dir)
    sections["Methods"] += sorted({f"methods/{path.name}" for path in docs.glob("methods/*.md")} - listed)
    sections["Papers"] += sorted({f"theory/{path.name}" for path in docs.glob("theory/*.md")} - listed)
    sections["Tutorials"] += sorted(
        {_site_path(f"notebooks/{path.name}") for path in site_notebooks.sources()} - listed
    )
    more = sorted({path.name for path in docs.glob("*.md")} - listed)
    if more:
        sections["How-to"].append({"More": more})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what is made by programs, and what pages link to outside of docs/."""
    made: dict[str, str | bytes] = {
        "index.md": (ROOT / "README.md").read_text(encoding="utf-8"),
        "reference/api.md": api_page(),
        "reference/cli.md": cli_page(),
        "reference/benchmarks.md": benchmarks_page(ROOT / "benchmarks" / "results"),
        **site_notebooks.pages(),
    }
    for path, text in made.items():
        files.append(File.generated(config, path, content=text))
    waiting = [(_origin(file.src_uri), file.content_string) for file in files.documentation_pages()]
    while waiting:
        origin, text = waiting.pop()
        for place in _outside(origin, text):
            if files.get_file_from_path(_site_path(place)) is not None:
                continue
            content = _shown(place)
            files.append(
                File.generated(config, _site_path(place), content=content, inclusion=InclusionLevel.NOT_IN_NAV)
            )
            if place.endswith(".md"):
                waiting.append((place, str(content)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Lead every relative link to where its target is on the site."""
    origin, here = _origin(page.file.src_uri), posixpath.dirname(page.file.src_uri)

    def moved(match: re.Match[str]) -> str:
        before, target = match.groups()
        path, mark, anchor = target.partition("#")
        place = _target(origin, path)
        if place is None:
            return match.group(0)
        return before + posixpath.relpath(_site_path(place), here or ".") + mark + anchor

    return LINK.sub(moved, markdown)


def on_page_content(content: str, **_: object) -> str:
    """TeX becomes MathML."""

    def drawn(match: re.Match[str]) -> str:
        element, opening, tex = match.groups()
        display = "block" if opening == "[" else "inline"
        mathml = latex2mathml.converter.convert(html.unescape(tex).strip(), display=display)
        return f'<{element} class="arithmatex">{mathml}</{element}>'

    return EQUATION.sub(drawn, content)


def _pages(nav: object) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    entries = nav.values() if isinstance(nav, dict) else nav
    return [page for entry in entries for page in _pages(entry)]


def _origin(site_path: str) -> str:
    """Where in the repository a page comes from."""
    if site_path == "index.md":
        return "README.md"
    if site_path.startswith("tutorials/"):
        return "notebooks/README.md" if site_path.endswith("/index.md") else f"notebooks/{Path(site_path).stem}.py"
    if site_path.startswith(("project/", "source/")):
        return site_path.partition("/")[2].removesuffix(".md") + (".md" if site_path.startswith("project/") else "")
    return f"docs/{site_path}"


def _target(origin: str, path: str) -> str | None:
    """The file or folder of the repository that a relative link means; None if it is no such link."""
    if not path or "://" in path or path.startswith(("mailto:", "/")):
        return None
    place = posixpath.normpath(posixpath.join(posixpath.dirname(origin), path))
    return place if not place.startswith("..") and (ROOT / place).exists() else None


def _outside(origin: str, text: str) -> set[str]:
    targets = {_target(origin, found.partition("#")[0]) for _, found in LINK.findall(text)}
    return {
        place for place in targets if place and place not in BESIDE and (ROOT / place).is_file() and not _in_docs(place)
    }


def _in_docs(place: str) -> bool:
    return place.startswith("docs/") and not place.startswith("docs/data/") and not place.endswith(".toml")


def _site_path(place: str) -> str:
    """Where on the site a file or folder of the repository is."""
    if place in BESIDE:
        return BESIDE[place]
    if (notebook := ROOT / place).parent == site_notebooks.SOURCES and notebook.suffix in (".py", ".md"):
        return "tutorials/index.md" if notebook.suffix == ".md" else f"tutorials/{notebook.stem}.md"
    if (ROOT / place).is_dir():
        return LISTED.get(place.rstrip("/"), f"{place.removeprefix('docs/')}/README.md")
    if _in_docs(place):
        return place.removeprefix("docs/")
    if place.endswith(".md"):
        return f"project/{place}"
    return f"source/{place}.md" if Path(place).suffix in CODE else f"source/{place}"


def _shown(place: str) -> str | bytes:
    """A file outside of docs/ as it is on the site: Markdown and data as they are, code as a page."""
    path = ROOT / place
    if path.suffix not in CODE:
        return path.read_bytes() if path.suffix != ".md" else path.read_text(encoding="utf-8")
    text = path.read_text(encoding="utf-8")
    fence = "~" * 6
    return f"---\nsearch:\n  exclude: true\n---\n\n# {place}\n\n{fence}{CODE[path.suffix]}\n{text}{fence}\n"
