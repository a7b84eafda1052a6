"""`inlay doctor`: what is here, what is missing, how to get it."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from inlay.cli import show


def command(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    network: Annotated[bool, typer.Option("--network", help="Also ask whether the hub answers.")] = False,
) -> None:
    """Print versions, devices, caches, what is missing and how to get it.

    It fetches nothing, and asks the network only with --network. The exit status is 1 when something is missing that
    inlay does not work without.
    """
    from inlay.workflow import doctor

    findings = doctor.examine(network)
    if as_json:
        show.answer(json.dumps(doctor.to_json(findings), indent=2))
    else:
        rows = [(each.topic, each.name, each.state, each.value, each.remedy) for each in findings]
        show.table(("about", "what", "state", "found", "what to do"), rows)
        lacking = [each for each in findings if each.state == "missing"]
        for each in lacking:
            show.say(f"Missing: {each.name}: {each.value}. {each.remedy}")
        if not lacking:
            show.say("All is here that inlay needs. A note is about what only some commands want.")
    if not doctor.healthy(findings):
        raise typer.Exit(1)
