"""`detcompile check`: a model's certificate, or why it has none, as text, JSON or a page."""

import json
from pathlib import Path
from typing import Annotated

import typer

from detcompile.commands.options import Device, Dtype, Json, Model, Random, TpSizes, compile_model, sizes
from detcompile.commands.pages.certificate_page import certificate_page, refusal_page
from detcompile.commands.text_files import require_place, write_text_file
from detcompile.commands.verification import ModelSpec
from detcompile.digests import fingerprint
from detcompile.errors import DetcompileError

__all__ = ["command"]


def command(
    model: Model,
    json_output: Json = False,
    random: Random = False,
    dtype: Dtype = None,
    device: Device = None,
    tp_sizes: TpSizes = "1,2,4,8",
    html: Annotated[Path | None, typer.Option(help="Also write it, or the refusal, as a page to this file.")] = None,
) -> None:
    """Print the certificate: every operation, its place in the model's source, its class, order and proof."""
    if html is not None:
        require_place(html, "--html")
    try:
        compiled = compile_model(ModelSpec(model, random, dtype, device, sizes(tp_sizes)))
    except DetcompileError as error:
        if html is not None:
            write_text_file(html, refusal_page(error, title=Path(model).name))
        raise
    if html is not None:
        page = certificate_page(compiled.certificate, title=Path(model).name, fingerprint=compiled.fingerprint)
        write_text_file(html, page)
    if json_output:
        parts = compiled.fingerprint_parts
        found = {"fingerprint": fingerprint(parts), "fingerprint_parts": parts}
        found |= {"weight_digests": compiled.weight_digests(), **json.loads(compiled.certificate.to_json())}
        print(json.dumps(found))
        return
    print(compiled.certificate)
    print(f"\n{compiled.certificate.summary()}; fingerprint {compiled.fingerprint}")
