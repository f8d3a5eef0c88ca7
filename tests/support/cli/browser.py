"""A headless Chromium, driven by the DevTools protocol over a pair of pipes."""

from __future__ import annotations

import base64
import fcntl
import itertools
import json
import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from host.console import Console
from host.debian_packages import install

Json = dict[str, Any]
SECONDS = 20.0
_NAMES = ("chromium", "chromium-browser", "google-chrome")
_FLAGS = (
    "--headless=new", "--remote-debugging-pipe", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
    "--disable-background-networking", "--disable-breakpad", "--disable-crash-reporter",
    "--disable-component-update", "--disable-extensions", "--disable-sync",
    "--hide-scrollbars", "--mute-audio", "--disable-features=Translate,OptimizationHints,MediaRouter",
    "--proxy-server=http://127.0.0.1:9", "--proxy-bypass-list=127.0.0.1",
)  # fmt: skip
"""The proxy is no one, so that a request to another host fails and none leaves this machine."""


def chromium() -> str:
    """Return the path of Chromium, which is installed where it is missing; SetupError: it cannot be."""
    found = next(filter(None, map(shutil.which, _NAMES)), None)
    if found is None:
        install(["chromium"], Console("browser"))
        found = shutil.which("chromium")
    assert found is not None
    return found


class Tab:
    """One tab. Every wait ends after SECONDS with an AssertionError."""

    def __init__(self, reader: int, writer: int) -> None:
        self._reader, self._writer = reader, writer
        self._numbers = itertools.count(1)
        self._rest = b""
        self.events: list[Json] = []
        """Events of the protocol: what was logged, requested and thrown."""
        target = self._send("Target.createTarget", {"url": "about:blank"}, "")["targetId"]
        self._session = self._send("Target.attachToTarget", {"targetId": target, "flatten": True}, "")["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log", "Accessibility", "DOM"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> Json:
        return self._send(method, parameters, self._session)

    def _send(self, method: str, parameters: Mapping[str, Any], session: str) -> Json:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters} | ({"sessionId": session} if session else {})
        os.write(self._writer, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: Json = answer["result"]
                return result
            self.events.append(answer)

    def _receive(self) -> Json:
        while b"\0" not in self._rest:
            assert select.select([self._reader], [], [], SECONDS)[0], "the browser does not answer"
            data = os.read(self._reader, 1 << 16)
            assert data, "the browser has ended"
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\0")
        answer: Json = json.loads(line)
        return answer

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)

    def look(self, *, width: int, height: int = 900, dark: bool = False) -> None:
        """Choose the size of the window in CSS pixels, and the theme."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        theme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[theme])

    def run(self, script: str) -> Any:
        """Return the value of an expression, or of the promise that it is."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, script: str) -> Any:
        """Return the value of an expression once it is true."""
        deadline = time.monotonic() + SECONDS
        while True:
            # The promise ends with the page's own next turn, so that this does not spin.
            value = self.run(f"new Promise((done) => setTimeout(() => done({script}), 50))")
            if value:
                return value
            assert time.monotonic() < deadline, f"{script}\n{self.text()}"

    def text(self) -> str:
        return str(self.run("document.body.innerText"))

    def wait_text(self, text: str) -> None:
        self.wait(f"document.body.innerText.includes({json.dumps(text)})")

    def press(self, key: str) -> None:
        """Press a key, such as `Tab` or `Enter`."""
        codes = {"Tab": 9, "Enter": 13, " ": 32, "ArrowDown": 40}
        text = {"Enter": "\r", " ": " "}.get(key)
        common = {"key": key, "code": {" ": "Space"}.get(key, key), "windowsVirtualKeyCode": codes[key]}
        self.call("Input.dispatchKeyEvent", type="keyDown", **common, **({"text": text} if text else {}))
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def spoken(self) -> list[tuple[str, str]]:
        """Return (role, name) of all that a screen reader reads, in its order."""
        nodes = self.call("Accessibility.getFullAXTree")["nodes"]
        return [
            (node.get("role", {}).get("value", ""), node.get("name", {}).get("value", ""))
            for node in nodes
            if not node.get("ignored")
        ]

    def picture(self, path: Path, *, whole: bool = True) -> None:
        """Write a PNG: of the whole page, or of what the window shows."""
        data = self.call("Page.captureScreenshot", captureBeyondViewport=whole, **(self._whole() if whole else {}))
        path.write_bytes(base64.b64decode(data["data"]))

    def _whole(self) -> Json:
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        return {"clip": {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}}


@contextmanager
def browser(folder: Path) -> Iterator[Tab]:
    """Start Chromium with a profile of its own in `folder`, and end all its processes."""
    command_read, command_write = map(_high, os.pipe())
    answer_read, answer_write = map(_high, os.pipe())
    flags = [*_FLAGS, f"--user-data-dir={folder / 'profile'}"]
    if os.geteuid() == 0:
        flags.append("--no-sandbox")  # its sandbox needs another user
    # It reads commands from descriptor 3 and writes to 4.
    script = f'exec "$@" 3<&{command_read} 4>&{answer_write} {command_read}<&- {answer_write}>&-'
    process = subprocess.Popen(
        ["bash", "-c", script, "-", chromium(), *flags],
        pass_fds=(command_read, answer_write), start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        env={"PATH": os.environ["PATH"], "HOME": str(folder), "XDG_RUNTIME_DIR": str(folder)},
    )  # fmt: skip
    os.close(command_read)
    os.close(answer_write)
    try:
        yield Tab(answer_read, command_write)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        os.close(command_write)
        os.close(answer_read)


def _high(descriptor: int) -> int:
    """Return a copy of a descriptor that is above those that the browser wants, instead of it."""
    copy = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(descriptor)
    return copy
