"""GET /: the page, which is one file and asks nobody but this server for anything."""

import base64
import functools
import hashlib
import re
from pathlib import Path

from starlette.responses import Response

__all__ = ["page"]

FILE = Path(__file__).with_name("index.html")
INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)


@functools.cache
def page() -> Response:
    """The page. Its policy lets browsers run its own script and style, by their digests, and nothing that gets into it
    later; connect to this server alone; and neither send forms nor show it in a frame."""
    text = FILE.read_text()
    digests = {kind: _digest(body) for kind, body in INLINE.findall(text)}
    policy = (
        f"default-src 'none'; script-src {digests['script']}; style-src {digests['style']}; connect-src 'self';"
        " img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for"
        " 'script'; trusted-types 'none'"
    )
    headers = {
        "Cache-Control": "no-cache",
        "Content-Security-Policy": policy,
        "Cross-Origin-Opener-Policy": "same-origin",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }
    return Response(text, media_type="text/html", headers=headers)


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
