"""`inlay lab activation-prompts`: Proposition 1, Lemma 1 and Theorem 1 of activation prompts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from inlay.cli import options as o
from inlay.errors import InlayError
from inlay.papers.lab import LAB, Out, choose_figures, parse_sizes, perform

if TYPE_CHECKING:
    from inlay.papers.findings import Finding, Tick

FIGURES = ("proposition-1", "lemma-1", "theorem-1")


def command(
    figure: Annotated[str, typer.Option(help="proposition-1, lemma-1, theorem-1 or all.")] = "all",
    seeds: Annotated[
        int, typer.Option(min=1, max=o.MOST_SEEDS, help="Trainings of each setting, with the seeds 0, 1, ...")
    ] = 5,
    tokens: Annotated[str, typer.Option(help="Theorem 1: numbers of tokens P, separated by commas.")] = "8,12,16,24",
    step: Annotated[float, typer.Option(help="Theorem 1: step size of SGD, the same for every P.")] = 4.0,
    batch: Annotated[int, typer.Option(min=1, help="Theorem 1: images a step, the same for every P.")] = 16,
    beta_squared: Annotated[
        float, typer.Option(help="Theorem 1: the attention's scale beta^2, the same in both layers.")
    ] = 3.0,
    noise: Annotated[float, typer.Option(min=0, help="Theorem 1: sigma times P.")] = 0.1,
    goal: Annotated[
        str, typer.Option(help="Theorem 1: train with SGD until zero 'error' or zero hinge 'risk'.")
    ] = "error",
    background: Annotated[str, typer.Option(help="Theorem 1: 'one' background an image, or 'mixed'.")] = "one",
    prompt_stays: Annotated[
        bool, typer.Option("--prompt-stays", help="Theorem 1: add the prompt after the permutation, as (A63) writes.")
    ] = False,
    out: Out = LAB,
    quiet: o.Quiet = False,
) -> None:
    """Proposition 1, Lemma 1 and Theorem 1 of the activation-prompt paper (appendix C), measured.

    The slow one is theorem-1: about a minute. --figure lemma-1 takes a second.

    \b
    inlay lab activation-prompts --figure all
    inlay lab activation-prompts --figure theorem-1 --beta-squared 2 --tokens 8,12,16 --seeds 3
    """
    names = choose_figures(figure, FIGURES)
    sizes = parse_sizes(tokens, "--tokens", "8,12,16,24")
    from inlay.papers.activation_prompts import charts
    from inlay.papers.activation_prompts.theory import SampleSetting, lab

    if beta_squared <= 0:
        raise InlayError(f"--beta-squared {beta_squared}: give a number above 0.")
    setting = SampleSetting(
        step=step,
        batch=batch,
        beta=beta_squared**0.5,
        noise=noise,
        background=background,
        prompt_stays=prompt_stays,
        goal=goal,
    )

    def experiment(name: str, tick: Tick) -> Finding:
        if name == "theorem-1":
            return lab.theorem_1(setting, sizes, seeds=seeds, tick=tick)
        tick(name)
        return lab.proposition_1() if name == "proposition-1" else lab.lemma_1()

    ticks = {"theorem-1": lab.trainings(setting, sizes)}
    perform(names, experiment, lambda name: ticks.get(name, 1), charts.DRAWN, out, quiet)
