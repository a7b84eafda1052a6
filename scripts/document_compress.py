"""The table of docs/compress.md, from what the paper of NTK-Attention keeps of inlay.papers.ntk_attention.compression.

python scripts/document_compress.py
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from generated import replaced
from page_tables import DOCS

from inlay.papers.ntk_attention.compression import RESULTS

PAGE = DOCS / "compress.md"
MEASURED = ("<!-- measured:begin -->", "<!-- measured:end -->")


def table(report: Mapping[str, Any]) -> list[str]:
    """The table of docs/compress.md: perplexity, and in brackets the share of the prompt's benefit."""
    from inlay.workflow.compress import CLOSED, DISTILLED, FITTED, NOTHING, PROMPTED

    who = (PROMPTED, NOTHING, CLOSED, FITTED, DISTILLED)
    given, versions = report["arguments"], report["versions"]
    about = (
        f"{report['model']}; {given['texts']} own texts of {given['length']} tokens, a fifth held out; "
        f"{given['steps']} steps of {given['batch_size']} texts; {versions.get('gpu') or versions['cpu']}. Perplexity, "
        "and the share of the prompt's benefit. Real texts are further examples of the prompt's kind: nothing was "
        "trained on them."
    )
    lines = [
        about,
        "",
        f"| prompt | texts | features | rank | learning rate | parameters | {' | '.join(who)} |",
        f"| --- | --- | --- | ---: | ---: | ---: |{' ---: |' * len(who)}",
    ]
    for result in report["results"]:
        settings = result["settings"]
        order = settings.get("taylor_order")
        features = f"{settings['feature_map']}, " + (
            f"order {order}" if order else f"{settings['feature_multiplier']}d"
        )
        for texts, scores in result["scores"].items():
            cells = [
                "-"
                if name not in scores
                else f"{scores[name]['perplexity']:.2f}"
                + (f" ({scores[name]['recovered']:.0%})" if scores[name]["recovered"] is not None else "")
                for name in who
            ]
            lines.append(
                f"| {result['prompt']}, {result['prompt_tokens']} | {texts} | {features} | {settings['rank']} | "
                f"{result['learning_rate']:g} | {result['parameters'] / 1e6:.2f}M | {' | '.join(cells)} |"
            )
    return lines


def main() -> None:
    lines = table(json.loads(RESULTS.read_text(encoding="utf-8")))
    text = replaced(PAGE.read_text(encoding="utf-8"), MEASURED, "\n".join(lines), PAGE)
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
