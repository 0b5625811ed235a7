"""The lab on this machine: a web server for the folder of a built site."""

from argparse import Namespace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


class Files(SimpleHTTPRequestHandler):
    """Files of the folder, as they are now."""

    # a system may say otherwise, and browsers then refuse it
    extensions_map = {".js": "text/javascript"}  # noqa: RUF012

    def end_headers(self) -> None:
        self.send_header("Cache-Control", "no-cache")
        super().end_headers()

    def log_message(self, *_) -> None:
        """Says nothing."""


class Server(ThreadingHTTPServer):
    def handle_error(self, *_) -> None:
        """Says nothing: a tab was closed before it had the whole file."""


def new_server(folder: str, port: int) -> Server:
    """Listens to this machine only. Raises ValueError for a folder without the lab, and for a port
    that cannot be."""
    if not Path(folder, "lab.html").is_file():
        raise ValueError(f"{folder} has no lab.html: `python -m tutorials.site` makes it")
    try:
        return Server(("127.0.0.1", port), partial(Files, directory=folder))
    except (OSError, OverflowError) as error:
        raise ValueError(f"port={port}: {error}") from error


def add_command(commands: Any) -> None:
    """Adds `lab` to the commands of a parser."""
    lab = commands.add_parser("lab", help="serve the scheduler lab of a built site")
    lab.add_argument("folder", nargs="?", default="build/site", help="default: build/site")
    lab.add_argument("--port", type=int, default=8001, help="0 is any free one (default: 8001)")


def run(args: Namespace) -> None:
    with new_server(args.folder, args.port) as server:
        print(
            f"The lab: http://127.0.0.1:{server.server_port}/lab.html (Ctrl-C ends it)", flush=True
        )
        server.serve_forever()
