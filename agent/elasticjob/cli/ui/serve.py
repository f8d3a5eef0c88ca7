"""`elasticjob ui`: serve the page until Ctrl-C."""

from __future__ import annotations

import contextlib
import html
import os
import secrets
import tempfile
import threading
import webbrowser
from collections.abc import Callable, Iterator
from pathlib import Path

from elasticjob.cli.cluster.connection import Cluster
from elasticjob.cli.cluster.errors import ClusterError
from elasticjob.cli.ui.feed import JobFeed
from elasticjob.cli.ui.server import PageServer
from elasticjob.cli.views.output import VerbOutput

TOKEN_BYTES = 24


def serve_page(
    cluster: Cluster, output: VerbOutput, *, all_namespaces: bool, port: int, open_browser: bool,
    browse: Callable[[str], bool] = webbrowser.open,
) -> int:  # fmt: skip
    """Serve the page until Ctrl-C; return the exit code. `port` 0: a free one; `browse`: opens a browser.

    ClusterError: the jobs cannot be listed, or the port is taken.
    """
    feed = JobFeed(cluster, all_namespaces=all_namespaces)
    feed.jobs()  # a wrong context is an error of the command, and not of a page
    try:
        server = PageServer(feed, secrets.token_urlsafe(TOKEN_BYTES), port)
    except OSError as error:
        raise ClusterError(f"port {port} of 127.0.0.1: {error.strerror}; choose another --port") from None
    with contextlib.suppress(KeyboardInterrupt), server:
        output.line(server.url)
        output.note("Who has this address can see what you may see. It works on this machine only, until Ctrl-C.")
        with _opened(server.url, browse) if open_browser else contextlib.nullcontext():
            server.serve_forever()
    return 0


@contextlib.contextmanager
def _opened(url: str, browse: Callable[[str], bool]) -> Iterator[None]:
    """Open the page in a browser. It gets a file that leads there: every local user can read a browser's arguments."""
    handle, name = tempfile.mkstemp(prefix="elasticjob-ui-", suffix=".html")  # only this user can read it
    with os.fdopen(handle, "w") as file:
        file.write(f'<!doctype html><meta http-equiv="refresh" content="0; url={html.escape(url)}">')
    try:
        # A browser of the terminal would hold up the server, which it waits for.
        threading.Thread(target=browse, args=(Path(name).as_uri(),), daemon=True).start()
        yield
    finally:
        Path(name).unlink(missing_ok=True)
