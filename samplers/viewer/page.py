"""Stories as a page: one file or one output of a notebook's cell, which loads nothing from anywhere."""

import html
import json
import uuid
from collections.abc import Sequence
from importlib import resources

from samplers.viewer.colors import PAPER, SCALE
from samplers.viewer.timeline import Story, cells_at, seen

_PART = resources.files("samplers.viewer").joinpath("page.html").read_text(encoding="utf-8").replace("@PAPER@", PAPER)
_HEAD, _, _TAIL = _PART.partition("@DATA@")

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>:root {{ color-scheme: light dark; }} body {{ margin: 1rem; background: light-dark(#fbfaf7, #16171a); }}</style>
</head>
<body>
{part}
</body>
</html>
"""


def part(stories: Sequence[Story], colour: str) -> str:
    """A part of a page, of which there may be any number in one; without scripts it shows how each canvas ended.

    Args:
        colour: what colours mean at first, "forward" or "confidence".
    """
    prompts = {story.prompt for story in stories}
    shared = seen(prompts.pop()) if len(stories) > 1 and len(prompts) == 1 else ""
    data = {
        "stories": [story.told() for story in stories],
        "prompt": shared,
        "colour": colour,
        "scale": [found.css for found in SCALE],
    }
    written = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")  # no text ends the script
    name, ended = f"dllm-{uuid.uuid4().hex[:12]}", "".join(map(_ended, stories))
    return _HEAD.replace("@ID@", name).replace("@FALLBACK@", ended) + written + _TAIL.replace("@ID@", name)


def page(stories: Sequence[Story], colour: str) -> str:
    """A whole page."""
    title = html.escape(" | ".join(story.name for story in stories))
    return _PAGE.format(title=title, part=part(stories, colour))


def _ended(story: Story) -> str:
    """The last frame as text."""
    text = "".join(seen(cell.text) for cell in cells_at(story, story.forwards))
    told = f"{story.name}: {story.forwards} forwards, {story.tokens} tokens"
    return f"<h3>{html.escape(told)}</h3><pre>{html.escape(text)}</pre>"
