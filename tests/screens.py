"""What a browser makes of pages at two widths: whether they scroll sideways, headings, words of pictures, contrast.

    findings(folder, pages)       in a Chromium without a window; each page loaded once, at 1280 and at 390 pixels
    python -m tests.screens FOLDER OUT [WORD]     pictures of the pages whose path has the word, to look at

One page of ours holds one page after the other in a frame, looks at it, and posts what it found.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Queue
from typing import Any

WIDTHS = {"desktop": 1280, "phone": 390}
PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-extensions",
    "--hide-scrollbars",
)
LONGEST_S = 300
LOOK = Path(__file__).with_name("screens.js")
PAGE = """<!DOCTYPE html><iframe id=frame style="border: 0; visibility: hidden"></iframe>
<script>const PAGES = {pages};
{look}</script>"""


def findings(folder: Path, pages: Sequence[str]) -> list[str]:
    """What is wrong with the pages below a folder, a line each; empty: nothing is.

    Rules of WCAG 2 AA: a heading of the first level, and none left out below it; every picture has words; text stands
    out from its ground by 4.5 to 1, large text by 3, in the light and in the dark.
    """
    assert PROGRAM is not None, "a page is looked at by Chromium"
    found: Queue[list[str]] = Queue()

    class Handler(SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path.startswith("/search/"):  # the index, which every page would read anew
                return self.send_error(404)
            if self.path != "/__look__":
                return super().do_GET()
            body = PAGE.format(pages=json.dumps(list(pages)), look=LOOK.read_text(encoding="utf-8")).encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.end_headers()
            self.wfile.write(body)
            return None

        def do_POST(self) -> None:
            found.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            with _browser(f"http://127.0.0.1:{server.server_address[1]}/__look__"):
                return found.get(timeout=LONGEST_S)
        finally:
            server.shutdown()
            thread.join()


@contextlib.contextmanager
def _browser(address: str) -> Iterator[None]:
    """A Chromium that shows the address; it ends with the block, and its files go."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        command = [str(PROGRAM), *FLAGS, f"--user-data-dir={folder}/profile", "--remote-debugging-port=0", address]
        with open(os.devnull, "wb") as nowhere:
            process = subprocess.Popen(
                command, stdout=nowhere, stderr=nowhere, env={**os.environ, "TMPDIR": folder}, start_new_session=True
            )
        try:
            yield
        finally:
            process.terminate()  # it ends its own processes
            try:
                process.wait(30)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def pictures(folder: Path, out: Path, word: str = "") -> None:
    """Writes a picture of each page at each width into ``out``."""
    out.mkdir(parents=True, exist_ok=True)
    for page in sorted(folder.rglob("*.html")):
        name = str(page.relative_to(folder)).removesuffix(".html").replace("/", "-")
        for kind, width in WIDTHS.items():
            if word in str(page.relative_to(folder)):
                size = f"--window-size={width},1600"
                picture = f"--screenshot={out / f'{name}-{kind}.png'}"
                command = [str(PROGRAM), *FLAGS, size, picture, page.resolve().as_uri()]
                subprocess.run(command, check=True, timeout=60, stderr=subprocess.DEVNULL)


if __name__ == "__main__":
    pictures(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:4])
