"""Makes the pictures of docs/viewer.md, by the embedded word problems on a CPU; needs Chromium:

PYTHONPATH=tests python docs/tools/viewer_pictures.py
"""

import tempfile
from pathlib import Path

from browser import Browser

from convert import embedded
from samplers import compare, generate, show

IMAGES = Path(__file__).parents[1] / "images"
QUESTION = "Q: Eve has 12 pears. Eve finds 9. Eve shares equally among 3. Eve gets 4 times as many. Eve loses 11.\nA: "
RULES = {
    "threshold 0.9": {"rule": "threshold", "cache": "none", "block_length": 0},
    "threshold 0.9, dual cache": {"rule": "threshold", "cache": "dual", "block_length": 8},
    "two tokens per forward": {"rule": "topk", "k": 2, "cache": "none", "block_length": 0},
    "remasking (ReMDM)": {"rule": "remask", "steps": 16, "cache": "none", "block_length": 0},
}


def picture(browser: Browser, page: Path, scheme: str, script: str, height: int, out: str) -> None:
    """A page after a script."""
    browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    browser.call("Emulation.setDeviceMetricsOverride", width=900, height=height, deviceScaleFactor=1, mobile=False)
    browser.open(page.as_uri())
    browser.run(script)
    (IMAGES / out).write_bytes(browser.picture())


def main() -> None:
    model = embedded.load("word-problems")
    answers = {name: generate(model, QUESTION, gen_length=32, trace=True, **options) for name, options in RULES.items()}
    compared, alone = compare(answers), show(answers["threshold 0.9, dual cache"], colour="confidence")
    compared.save(IMAGES / "viewer.gif")
    with tempfile.TemporaryDirectory() as folder:
        both, one = compared.save(Path(folder) / "both.html"), alone.save(Path(folder) / "one.html")
        browser = Browser(Path(folder) / "profile")
        go = "const bar = document.querySelector('input'); bar.value = 11; bar.dispatchEvent(new Event('input'))"
        picture(browser, both, "light", go, 690, "viewer.png")
        look = "document.querySelectorAll('[role=option]')[19].focus()"
        picture(browser, one, "dark", look, 350, "viewer-dark.png")
        browser.close()


if __name__ == "__main__":
    main()
