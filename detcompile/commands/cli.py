"""The command line: detcompile demo | generate | verify | check | export | tune-speculation. Results go to standard
output, progress to standard error."""

import io
import sys
from collections.abc import Callable

import typer
from transformers.utils import logging as transformers_logging

from detcompile.commands import check, demo, export, generate, tune_speculation, verify
from detcompile.commands.options import logs, with_options
from detcompile.errors import DetcompileError

__all__ = ["COMMANDS", "app", "main"]

COMMANDS: dict[str, Callable[..., None]] = {
    "verify": verify.command,
    "check": check.command,
    "export": export.command,
    "generate": generate.command,
    "demo": demo.command,
    "tune-speculation": tune_speculation.command,
}

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)
for name, command in COMMANDS.items():
    app.command(name)(with_options(command))


def main() -> None:
    """Entry point: our own errors end with their message and exit code 2, without a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # an answer may hold what a terminal's encoding does not
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()  # ours covers the load
    try:
        app()
    except DetcompileError as error:
        logs.print(f"[bold red]{type(error).__name__}[/]", highlight=False)
        logs.print(str(error), markup=False, highlight=False)
        sys.exit(2)


if __name__ == "__main__":
    main()
