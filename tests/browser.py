"""A real browser for tests: headless Chromium, steered by chromedriver over the WebDriver protocol.

Both come as Debian packages (chromium, chromium-driver). The protocol is JSON over HTTP, so that the standard library
is all that is needed, and the pointer, the wheel and the browser's own log are those that a user has.
"""

import base64
import json
import re
import shutil
import subprocess
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
MISSING = "no Chromium with chromedriver here (Debian: apt-get install chromium chromium-driver)"

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--force-device-scale-factor=1",
)

ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
"""Key of an element's name in the protocol."""


class Browser:
    """One window."""

    def __init__(self, address: str, session: str) -> None:
        self._address = f"{address}/session/{session}"

    def open(self, page: Path) -> None:
        """Shows a file."""
        self._send("POST", "/url", {"url": page.resolve().as_uri()})

    def run(self, script: str, *args: Any) -> Any:
        """What a function body returns in the page."""
        return self._send("POST", "/execute/sync", {"script": script, "args": list(args)})

    def errors(self) -> list[str]:
        """What the browser complained about since it was asked last."""
        return [entry["message"] for entry in self._send("POST", "/se/log", {"type": "browser"})]

    def resize(self, width: int, height: int) -> None:
        """Size of what the page sees."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._command("Emulation.setDeviceMetricsOverride", metrics)

    def prefer_dark(self, dark: bool) -> None:
        """The user's colour scheme."""
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self._command("Emulation.setEmulatedMedia", {"features": features})

    def screenshot(self) -> bytes:
        """The window as a PNG file."""
        return base64.b64decode(self._send("GET", "/screenshot"))

    def wheel(self, selector: str, x: int, y: int, delta: int) -> None:
        """Turns the wheel over a place of an element, counted from its middle."""
        origin = self._element(selector)
        action = {"type": "scroll", "x": x, "y": y, "deltaX": 0, "deltaY": delta, "origin": origin}
        self._act({"type": "wheel", "id": "wheel", "actions": [action]})

    def move(self, selector: str, x: int, y: int) -> None:
        """Moves the pointer to a place of an element, counted from its middle."""
        self._pointer([{"type": "pointerMove", "duration": 50, "origin": self._element(selector), "x": x, "y": y}])

    def drag(self, selector: str, start: tuple[int, int], end: tuple[int, int]) -> None:
        """Presses at one place of an element, counted from its middle, and lets go at another one."""
        move = {"type": "pointerMove", "duration": 50, "origin": self._element(selector)}
        self._pointer(
            [
                move | {"x": start[0], "y": start[1]},
                {"type": "pointerDown", "button": 0},
                move | {"x": (start[0] + end[0]) // 2, "y": end[1]},
                move | {"x": end[0], "y": end[1]},
                {"type": "pointerUp", "button": 0},
            ]
        )

    def click(self, selector: str) -> None:
        """Clicks an element."""
        element = self._element(selector)
        self._send("POST", f"/element/{element[ELEMENT]}/click", {})

    def _element(self, selector: str) -> dict[str, str]:
        found: dict[str, str] = self._send("POST", "/element", {"using": "css selector", "value": selector})
        return found

    def _pointer(self, actions: list[dict[str, Any]]) -> None:
        self._act({"type": "pointer", "id": "mouse", "parameters": {"pointerType": "mouse"}, "actions": actions})

    def _act(self, source: dict[str, Any]) -> None:
        self._send("POST", "/actions", {"actions": [source]})

    def _command(self, name: str, params: dict[str, Any]) -> None:
        self._send("POST", "/goog/cdp/execute", {"cmd": name, "params": params})

    def _send(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        return _request(method, self._address + path, body)


def _request(method: str, address: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(address, data, {"Content-Type": "application/json"}, method=method)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # it is this machine
    try:
        with opener.open(request, timeout=120) as answer:
            return json.loads(answer.read())["value"]
    except urllib.error.HTTPError as error:
        raise RuntimeError(f"{method} {address}: {error.read().decode()[:600]}") from None


@contextmanager
def browser() -> Iterator[Browser]:
    """A browser of its own, with an empty profile; both programs end with it."""
    assert BROWSER and DRIVER, MISSING
    with tempfile.TemporaryDirectory(prefix="browser-", ignore_cleanup_errors=True) as profile:
        driver, port = _started(DRIVER)
        try:
            address = f"http://127.0.0.1:{port}"
            options = {"binary": BROWSER, "args": [*FLAGS, f"--user-data-dir={profile}"]}
            wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
            session = _request("POST", f"{address}/session", {"capabilities": {"alwaysMatch": wanted}})["sessionId"]
            try:
                yield Browser(address, session)
            finally:
                _request("DELETE", f"{address}/session/{session}")
        finally:
            driver.terminate()
            driver.wait(20)
            assert driver.stdout is not None
            driver.stdout.close()


def _started(program: str) -> tuple[subprocess.Popen[str], int]:
    """A running chromedriver, and the port that it chose."""
    for _ in range(5):  # it takes a port that is free for IPv4, and ends if the same one is not free for IPv6
        driver = subprocess.Popen([program, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert driver.stdout is not None
        for line in driver.stdout:
            if match := re.search(r"started successfully on port (\d+)", line):
                return driver, int(match[1])
        driver.wait(20)
        driver.stdout.close()
    raise RuntimeError("chromedriver ended before it listened, five times")
