"""A headless browser for tests of pages; there is one where Chromium is installed."""

import base64
import json
import os
import shutil
import subprocess

from conftest import wait_until

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Browser:
    """Headless Chromium with one page, driven through its pipe."""

    def __init__(self, folder):
        (theirs, self._out), (self._in, other) = os.pipe(), os.pipe()
        flags = ("--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--window-size=900,800")
        script = f'exec "$0" "$@" 3<&{theirs} 4>&{other}'
        command = ["bash", "-c", script, CHROMIUM, *flags, f"--user-data-dir={folder}", "about:blank"]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self._process = subprocess.Popen(command, pass_fds=(theirs, other), **quiet)
        os.close(theirs), os.close(other)
        self._held, self._count, self._session = b"", 0, None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    def call(self, method, **said):
        """Of the DevTools protocol."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": said}
        message |= {} if self._session is None else {"sessionId": self._session}
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._count:
                assert "error" not in answer, answer
                return answer["result"]

    def _read(self):
        while b"\0" not in self._held:
            found = os.read(self._in, 1 << 16)
            assert found, "the browser has ended"
            self._held += found
        message, _, self._held = self._held.partition(b"\0")
        return json.loads(message)

    def run(self, script):
        """What a script gives."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait(self, script):
        """Until a script gives something true."""
        wait_until(lambda: self.run(script))

    def open(self, url):
        """Shows a page, and waits until it is there."""
        self.call("Page.enable")
        self.call("Page.navigate", url=url)
        while self._read().get("method") != "Page.loadEventFired":
            pass

    def picture(self):
        """The page as PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])

    def close(self):
        self._process.terminate()
        self._process.wait(30)
        os.close(self._in), os.close(self._out)
