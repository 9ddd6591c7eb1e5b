"""Makes the pictures of the site that `make docs` wrote; needs Chromium:

PYTHONPATH=tests python docs/tools/site_pictures.py
"""

import functools
import http.server
import tempfile
import threading
from pathlib import Path

from browser import Browser

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "docs" / "images"


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves a folder, without a log."""

    def log_message(self, *_: object) -> None:
        pass


def main() -> None:
    handler = functools.partial(Quiet, directory=str(ROOT / "site"))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for scheme in ("light", "dark"):
        picture(scheme, f"http://127.0.0.1:{server.server_port}/index.html")


def picture(scheme: str, url: str) -> None:
    """A page in a new browser that prefers light or dark pages."""
    with tempfile.TemporaryDirectory() as folder:
        browser = Browser(Path(folder) / "profile")
        browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        browser.call("Emulation.setDeviceMetricsOverride", width=1240, height=760, deviceScaleFactor=1, mobile=False)
        browser.open(url)
        browser.run("new Promise(done => setTimeout(done, 1000))")  # the search box comes with its script
        (IMAGES / f"site-{scheme}.png").write_bytes(browser.picture())
        browser.close()


if __name__ == "__main__":
    main()
