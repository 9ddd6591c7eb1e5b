"""The page that shows the canvas while it is written: one file, which loads nothing from other servers."""

import base64
import hashlib
import re
from importlib import resources

from samplers.viewer.colors import PAPER

PAGE = resources.files("samplers.serving").joinpath("view.html").read_text(encoding="utf-8").replace("@PAPER@", PAPER)


def _hash_of(tag: str) -> str:
    """The hash of the page's script or style, the only ones that may run."""
    found = re.search(rf"<{tag}>(.*?)</{tag}>", PAGE, re.DOTALL)
    assert found is not None
    return base64.b64encode(hashlib.sha256(found[1].encode()).digest()).decode()


_POLICY = (
    "default-src 'none'",
    f"script-src 'sha256-{_hash_of('script')}'",
    f"style-src 'sha256-{_hash_of('style')}'",
    "connect-src 'self'",
    "base-uri 'none'",
    "form-action 'none'",
    "frame-ancestors 'none'",
)

HEADERS = {
    "Content-Security-Policy": "; ".join(_POLICY),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
