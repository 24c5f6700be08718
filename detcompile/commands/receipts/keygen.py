"""`detcompile keygen`: makes a key pair for receipts."""

from pathlib import Path
from typing import Annotated

import typer

from detcompile.serving.receipts.keys import write_key_pair


def command(
    path: Annotated[Path, typer.Argument(help="File of the key; the public one has .pub appended.")],
) -> None:
    """Make a key that signs receipts, and the public one that verifies them."""
    key = write_key_pair(path)
    print(f"{path} signs (detcompile serve --sign {path}); {path}.pub verifies; key id {key.key_id}")
