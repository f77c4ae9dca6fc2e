"""The command line: every command calls one library function."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.logging import RichHandler
from rich.text import Text

from ithaca.errors import IthacaError
from ithaca.extras import require

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Attention across many devices.")


@app.command()
def demo(
    prompt: Annotated[
        list[str] | None,
        typer.Option(help="'a <digit> drifting <direction>', as in 'a seven drifting up'. Repeatable."),
    ] = None,
    ranks: Annotated[int, typer.Option(help="CPU ranks to run on.")] = 2,
    out: Annotated[Path, typer.Option(help="Where video.gif and frames.png go.")] = Path("ithaca-demo"),
    seed: Annotated[int, typer.Option(help="Of the noise that the videos are drawn from.")] = 0,
) -> None:
    """Generate a video on one rank and on several, compare results and times."""
    require("demo", "the demo")
    from ithaca.demo.run import PROMPTS, run_demo

    run_demo(prompt or PROMPTS, ranks, out, seed)


@app.command()
def doctor() -> None:
    """Tell what this machine offers: ranks, exchanges, torch, threads, memory."""
    from ithaca.doctor import examine

    Console().print(examine())


@app.command()
def certify(
    factory: Annotated[str, typer.Argument(help="MODULE:FACTORY, what makes the backend, as in 'ithaca:SdpaBackend'.")],
    json: Annotated[Path | None, typer.Option(help="Write the certificate to this file.")] = None,
) -> None:
    """Show whether a backend may be handed receive slots: run it through all that it says it supports."""
    from ithaca.verify import report

    certificate = report.certified(factory)
    Console().print(report.table(certificate))
    if json is not None:
        json.write_text(certificate.to_json())
    raise typer.Exit(0 if certificate.passed else 1)


@app.command()
def explore(
    scenario: Annotated[str | None, typer.Argument(help="Which one; all of them if none is named.")] = None,
    ranks: Annotated[int, typer.Option(help="Simulated ranks, 2 to 4.")] = 2,
    layers: Annotated[int, typer.Option(help="Attention layers that each goes through.")] = 3,
    copies: Annotated[str, typer.Option(help="Where the copies run: 'inline', or beside the rank as an 'agent'.")] = (
        "inline"
    ),
    schedules: Annotated[int, typer.Option(help="Schedules to run, at most.")] = 1000,
    seed: Annotated[int, typer.Option(help="The first one's seed; each further one has the next.")] = 0,
    preemptions: Annotated[
        int | None, typer.Option(help="Go through all schedules that interrupt a rank so many times at most.")
    ] = None,
    schedule: Annotated[str | None, typer.Option(help="Run this one again, as in 'seed-7'.")] = None,
    processes: Annotated[
        int | None, typer.Option(help="Among which random schedules are shared out; as many as cores, if not given.")
    ] = None,
) -> None:
    """Run the exchange on simulated ranks through many schedules: look for races, deadlocks and wrong results."""
    from rich.progress import track

    from ithaca.verify import report
    from ithaca.verify.exploration import explore as explored
    from ithaca.verify.scenarios import SCENARIOS

    names = list(SCENARIOS) if scenario is None else [scenario]
    options = {"ranks": ranks, "layers": layers, "copies": copies, "schedules": schedules, "seed": seed}
    options["processes"] = processes or len(os.sched_getaffinity(0))
    console = Console()
    reports = {
        name: explored(name, **options, preemptions=preemptions, schedule=schedule)  # type: ignore[arg-type]
        for name in track(names, "exploring", console=Console(stderr=True), transient=True)
    }
    console.print(report.exploration_table(reports))
    found = [finding for each in reports.values() for finding in each.findings]
    for finding in found:
        console.print(f"{finding.scenario} {finding.schedule}: {finding.error}", markup=False, highlight=False)
    raise typer.Exit(1 if found else 0)


def main() -> None:
    """Entry point: errors of the library are told in their own words, without a traceback."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", handlers=[RichHandler(show_path=False)])
    try:
        app()
    except (ModuleNotFoundError, IthacaError) as error:
        # Not as markup, which would swallow what stands in brackets; and unwrapped, so that a command can be copied.
        text = Text.assemble((type(error).__name__, "bold red"), f": {error}")
        Console(stderr=True).print(text, soft_wrap=True)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
