"""The command line: every command calls one library function."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.logging import RichHandler

from ithaca.errors import IthacaError

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


def main() -> None:
    """Entry point: errors of the library are told in their own words, without a traceback."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", handlers=[RichHandler(show_path=False)])
    try:
        app()
    except ModuleNotFoundError as error:
        Console(stderr=True).print(f"this command was required to find {error.name}: pip install 'ithaca[demo]'")
        raise SystemExit(1) from None
    except IthacaError as error:
        Console(stderr=True).print(f"[bold red]{type(error).__name__}[/]: {error}", highlight=False)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
