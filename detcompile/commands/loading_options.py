"""Options for loading a model, in a module that imports no torch: the server's front end runs without it."""

from dataclasses import dataclass
from typing import Annotated

import typer

Device = Annotated[str | None, typer.Option(help="cpu or cuda; default: a GPU if there is one.")]
Random = Annotated[bool, typer.Option("--random", help="Random weights for the model's config.json.")]


@dataclass(frozen=True, kw_only=True)
class LoadingOptions:
    """Options for loading MODEL, named as in load_model."""

    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16; default: the checkpoint's.")] = None
    device: Device = None
    tp_sizes: Annotated[str | None, typer.Option(help="Declared tensor-parallel sizes; default: 1,2,4,8.")] = None
    numerics: Annotated[
        str | None, typer.Option(help="float, or exact integers: exact16, exact8x16, exact8; default: float.")
    ] = None
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit on the Hub; default: main.")] = None
    token: Annotated[str | None, typer.Option(help="Hub token; default: HF_TOKEN, or the login of `hf auth`.")] = None
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code from the checkpoint.")
    ] = False
    dequantize: Annotated[
        bool | None,
        typer.Option(help="Dequantize .gguf files and quantized experts, or keep them quantized; default: dequantize."),
    ] = None


def sizes(text: str) -> tuple[int, ...]:
    """Parse an option such as 1,2,4,8.

    Raises:
        typer.BadParameter: an item is not an integer.
    """
    try:
        return tuple(int(size) for size in text.split(","))
    except ValueError as error:
        raise typer.BadParameter(f"{text!r}: give comma-separated integers, such as 1,2,4,8") from error
