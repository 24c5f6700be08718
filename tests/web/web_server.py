"""Start a server over the scripted engine for a browser: python -m tests.web.web_server [--no-demo] [KEY].

It prints its address. With --no-demo, the page cannot kill engines.
"""

import asyncio
import hashlib
import sys

from detcompile.serving import server
from detcompile.serving.app import new_app
from detcompile.serving.logs import write_logs
from tests.serving.scripted_service import SPEC, scripted

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"


async def main() -> int:
    write_logs(as_json=False)
    service = scripted(most_restarts=5, chat_template=TEMPLATE)
    demo = "--no-demo" not in sys.argv
    digests = [hashlib.sha256(key.encode()).digest() for key in sys.argv[1:] if key != "--no-demo"]
    with server.listen("127.0.0.1", 0) as sock:
        app = new_app(service, "test", digests, demo=demo, root_path="/ai")
        return await server.serve(service, app, SPEC, sock, 1.0)


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
