"""`detcompile check`: shows a model's certificate, or why it was refused, as text, JSON or a page."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from detcompile.commands.loading_options import Random
from detcompile.commands.options import Json, Loading, Model, compile_model
from detcompile.commands.pages.certificate_page import Measurement, certificate_page, read_measurements
from detcompile.commands.pages.refusal_page import refusal_page
from detcompile.commands.text_files import require_place, write_text_file
from detcompile.digests import fingerprint
from detcompile.errors import DetcompileError, InvalidInput
from detcompile.models.compiled import CompiledModel


def command(
    model: Model,
    json_output: Json = False,
    random: Random = False,
    *,
    loading: Loading,
    html: Annotated[Path | None, typer.Option(help="Also write it, or the refusal, as a page to this file.")] = None,
    verify: Annotated[
        Path | None, typer.Option(help="With --html: what `detcompile verify MODEL --json` printed, for the page.")
    ] = None,
) -> None:
    """Print the certificate: every operation, its place in the model's source, its class, order and proof."""
    if html is not None:
        require_place(html, "--html")
    elif verify is not None:
        raise typer.BadParameter("measurements are shown on the page: add --html", param_hint="--verify")
    measured = None if verify is None else read_measurements(verify)
    try:
        compiled = compile_model(loading.spec(model, random))
    except DetcompileError as error:
        if html is not None:
            options = {"device": loading.device, "dtype": loading.dtype, "made": _now()}
            facts = {name: value for name, value in options.items() if value is not None}
            write_text_file(html, refusal_page(error, title=Path(model).name, facts=facts))
        raise
    parts = compiled.fingerprint_parts
    if html is not None:
        write_text_file(html, _page(compiled, Path(model).name, parts, measured))
    if json_output:
        record = {"fingerprint": fingerprint(parts), "fingerprint_parts": parts}
        record |= {"weight_digests": compiled.weight_digests(), **json.loads(compiled.certificate.to_json())}
        print(json.dumps(record))
        return
    print(compiled.certificate)
    print(f"\n{compiled.certificate.summary()}; fingerprint {fingerprint(parts)}")


def _page(
    compiled: CompiledModel, name: str, parts: dict[str, str], measured: tuple[str, dict[str, Measurement]] | None
) -> str:
    """Render the certificate as an HTML page."""
    digest = fingerprint(parts)
    if measured is not None and measured[0] != digest:
        raise InvalidInput(
            f"--verify: the file was measured with fingerprint {measured[0]}, but this model has {digest}: run"
            f" `detcompile verify {name} --json` with the same options again"
        )
    facts = {
        "model": name,
        "device": ": ".join([str(compiled.device), *filter(None, [parts.get("device")])]),  # exact: no such part
        "dtype": str(compiled.dtype).removeprefix("torch."),
        "made": _now(),
        "fingerprint": digest,
    }
    axes = None if measured is None else measured[1]
    return certificate_page(compiled.certificate, title=name, facts=facts, parts=parts, measured=axes)


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
