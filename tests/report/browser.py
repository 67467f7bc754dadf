"""A real Chromium without a window, spoken to over its debugging port (on loopback)."""

import base64
import itertools
import json
import shutil
import subprocess
import time
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
LIMIT = 60  # seconds


class Browser:
    """One page, and everything that it asked for or complained about."""

    def __init__(self, profile: Path) -> None:
        websocket = pytest.importorskip("websocket", reason="websocket-client is not installed.")
        program = next(filter(None, map(shutil.which, NAMES)), None)
        if program is None:
            pytest.skip("Chromium is not installed: apt-get install chromium.")
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-port=0"]
        flags += ["--disable-dev-shm-usage", f"--user-data-dir={profile}", "--no-first-run", "--remote-allow-origins=*"]
        self._process = subprocess.Popen([program, *flags, "about:blank"], stderr=subprocess.PIPE, text=True)
        port_file, began = profile / "DevToolsActivePort", time.monotonic()
        while not (port_file.exists() and port_file.read_text().count("\n")):
            if self._process.poll() is not None:
                pytest.skip(f"Chromium cannot be started here: {self._process.stderr.read()[-300:]}")
            assert time.monotonic() < began + LIMIT, "Chromium does not start"
            time.sleep(0.05)
        port, path = port_file.read_text().split("\n")[:2]
        self._socket = websocket.create_connection(f"ws://127.0.0.1:{port}{path}", timeout=LIMIT, suppress_origin=True)
        self._numbers, self.events = itertools.count(1), []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = None
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Log", "Runtime"):
            self.call(f"{domain}.enable")

    _session = None

    def call(self, method, **params):
        """The answer to a command; events that come before it are kept."""
        number = next(self._numbers)
        about = {"sessionId": self._session} if self._session else {}
        self._socket.send(json.dumps({"id": number, "method": method, "params": params, **about}))
        while True:
            message = json.loads(self._socket.recv())
            if message.get("id") == number:
                assert "error" not in message, message
                return message["result"]
            self.events.append(message)

    def open(self, path: Path, width: int, height: int = 900, dark: bool = False) -> None:
        """Opens a file, and waits until it is loaded."""
        self.events.clear()
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=path.absolute().as_uri())
        began = time.monotonic()
        while not self.named("Page.loadEventFired"):
            assert time.monotonic() < began + LIMIT
            self.call("Runtime.evaluate", expression="1")
            time.sleep(0.02)
        time.sleep(0.1)
        self.evaluate("document.title")  # takes in what has come since

    def named(self, method):
        return [event["params"] for event in self.events if event.get("method") == method]

    def evaluate(self, expression):
        return self.call("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def requests(self):
        return [event["request"]["url"] for event in self.named("Network.requestWillBeSent")]

    def complaints(self):
        """What a developer would see in the console."""
        return [
            *(event["entry"]["text"] for event in self.named("Log.entryAdded")),
            *map(str, self.named("Runtime.exceptionThrown")),
            *map(str, self.named("Runtime.consoleAPICalled")),
        ]

    def screenshot(self) -> bytes:
        return base64.b64decode(self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)["data"])

    def pdf(self) -> bytes:
        return base64.b64decode(self.call("Page.printToPDF", printBackground=True)["data"])

    def close(self) -> None:
        self._socket.close()
        self._process.terminate()
        self._process.wait(timeout=LIMIT)
        self._process.stderr.close()
