"""Timelines as HTML: one file, or one output of a notebook's cell, which loads nothing from other servers."""

import html
import json
import uuid
from collections.abc import Sequence
from importlib import resources

from samplers.viewer.colors import PAPER, SCALE
from samplers.viewer.timeline import Timeline, cells_at, page_text

_FRAGMENT = (
    resources.files("samplers.viewer").joinpath("page.html").read_text(encoding="utf-8").replace("@PAPER@", PAPER)
)
_HEAD, _, _TAIL = _FRAGMENT.partition("@DATA@")

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>:root {{ color-scheme: light dark; }} body {{ margin: 1rem; background: light-dark(#fbfaf7, #16171a); }}</style>
</head>
<body>
{fragment}
</body>
</html>
"""


def fragment(timelines: Sequence[Timeline], colour: str) -> str:
    """An HTML fragment, of which a page may have any number; without scripts it shows how each canvas ended.

    Args:
        colour: what colours mean at first, "forward" or "confidence".
    """
    prompts = {timeline.prompt for timeline in timelines}
    shared = page_text(prompts.pop()) if len(timelines) > 1 and len(prompts) == 1 else ""
    data = {
        "timelines": [timeline.as_json() for timeline in timelines],
        "prompt": shared,
        "colour": colour,
        "scale": [found.css for found in SCALE],
    }
    written = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")  # no text ends the script
    name, canvases = f"dllm-{uuid.uuid4().hex[:12]}", "".join(map(_last_canvas, timelines))
    return _HEAD.replace("@ID@", name).replace("@FALLBACK@", canvases) + written + _TAIL.replace("@ID@", name)


def full_page(timelines: Sequence[Timeline], colour: str) -> str:
    """A whole page."""
    title = html.escape(" | ".join(timeline.name for timeline in timelines))
    return _PAGE.format(title=title, fragment=fragment(timelines, colour))


def _last_canvas(timeline: Timeline) -> str:
    """The canvas at the end, as text."""
    text = "".join(page_text(cell.text) for cell in cells_at(timeline, timeline.forwards))
    facts = f"{timeline.name}: {timeline.forwards} forwards, {timeline.tokens} tokens"
    return f"<h3>{html.escape(facts)}</h3><pre>{html.escape(text)}</pre>"
