"""A real browser, driven over a pipe by the standard library alone: Chromium's DevTools protocol, JSON ended by zeros."""

from __future__ import annotations

import base64
import json
import os
import select
import shlex
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any


def chromium() -> str | None:
    """Where Chromium is, if it is installed; $CHROMIUM names another one."""
    names = (os.environ.get("CHROMIUM"), "chromium", "chromium-browser", "google-chrome", "chrome")
    return next((path for name in names if name and (path := shutil.which(name))), None)


class Browser:
    """One page. Its log, its errors and the addresses that it loads are kept in `said`, `thrown` and `requested`."""

    def __init__(self, folder: Path, program: str, patience: float = 30.0) -> None:
        here, there = os.pipe(), os.pipe()
        flags = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--hide-scrollbars",
        ]
        flags += ["--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions"]
        words = shlex.join([program, *flags, f"--user-data-dir={folder}", "--remote-debugging-pipe", "about:blank"])
        self.process = subprocess.Popen(
            ["bash", "-c", f"exec {words} 3<&{here[0]} 4>&{there[1]}"],
            pass_fds=(here[0], there[1]),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(here[0])
        os.close(there[1])
        self._to, self._from, self._left, self._number, self.patience = here[1], there[0], b"", 0, patience
        self.said: list[str] = []
        self.thrown: list[str] = []
        self.requested: list[str] = []
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and wait for its answer."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._to, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + self.patience
        while True:
            answer = self._read(until)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return dict(answer["result"])
            self._note(answer)

    def _read(self, until: float) -> dict[str, Any]:
        while b"\0" not in self._left:
            ready, _, _ = select.select([self._from], [], [], max(0.0, until - time.monotonic()))
            more = os.read(self._from, 1 << 20) if ready else b""
            if not more:
                raise RuntimeError("the browser " + ("went away" if ready else f"did not answer within {self.patience:g} s"))
            self._left += more
        message, self._left = self._left.split(b"\0", 1)
        return dict(json.loads(message))

    def _note(self, event: dict[str, Any]) -> None:
        method, params = event.get("method"), event.get("params", {})
        if method == "Runtime.consoleAPICalled":
            self.said.append(f"{params['type']}: {params['args']}")
        elif method == "Log.entryAdded":
            self.said.append(f"{params['entry']['level']}: {params['entry']['text']}")
        elif method == "Runtime.exceptionThrown":
            self.thrown.append(json.dumps(params["exceptionDetails"])[:500])
        elif method == "Network.requestWillBeSent":
            self.requested.append(params["request"]["url"])

    def size(self, width: int, height: int, touch: bool = False) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=touch)

    def dark(self, on: bool) -> None:
        feature = {"name": "prefers-color-scheme", "value": "dark" if on else "light"}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    def open(self, path: Path, settle: bool = True) -> None:
        """Load a file, and wait until it has drawn twice."""
        self.call("Page.navigate", url=path.resolve().as_uri())
        until = time.monotonic() + self.patience
        while self.js("document.readyState") != "complete":
            if time.monotonic() > until:
                raise RuntimeError(f"{path} did not load")
            time.sleep(0.02)
        if settle:
            self.settle()

    def settle(self) -> None:
        self.js("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")

    def js(self, expression: str) -> Any:
        """What an expression is worth in the page, as plain data."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def middle(self, selector: str) -> tuple[float, float, float, float]:
        """Scroll an element into view; its middle, width and height on the screen."""
        return tuple(
            self.js(
                f"(() => {{ const e = document.querySelector({json.dumps(selector)}); "
                'e.scrollIntoView({block: "center", behavior: "instant"}); const b = e.getBoundingClientRect(); '
                "return [b.left + b.width / 2, b.top + b.height / 2, b.width, b.height]; })()"
            )
        )

    def move(self, x: float, y: float) -> None:
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, selector: str) -> None:
        x, y, _, _ = self.middle(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def key(self, name: str) -> None:
        typed = {"text": "\r", "windowsVirtualKeyCode": 13} if name == "Enter" else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=name, code=name, **typed)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=name, code=name)

    def picture(self, path: Path) -> None:
        data = self.call("Page.captureScreenshot", format="png")["data"]
        path.write_bytes(base64.b64decode(data))

    def close(self) -> None:
        """End the browser that was started here."""
        self._session = None
        try:
            self.call("Browser.close")
            self.process.wait(10)
        except (RuntimeError, OSError, subprocess.TimeoutExpired):
            self.process.kill()
            self.process.wait()
        os.close(self._to)
        os.close(self._from)
