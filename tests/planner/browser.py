"""A headless Chromium, driven over its debugging pipe: no driver, no network."""

import base64
import fcntl
import itertools
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_KEYS = {"Tab": 9, "ArrowRight": 39, "ArrowLeft": 37, " ": 32}


class Browser:
    """One page of one browser; close it by leaving the ``with`` block."""

    def __init__(self, folder: Path, width: int = 1300, height: int = 1600) -> None:
        read_ours, write_theirs = os.pipe()
        read_theirs, write_ours = os.pipe()
        # High numbers, so that none of them is 3 or 4, which the browser reads commands from and answers on.
        commands, answers = (fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in (read_theirs, write_theirs))

        def wire() -> None:
            os.dup2(commands, 3)
            os.dup2(answers, 4)

        arguments = ["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--no-first-run"]
        arguments += [f"--user-data-dir={folder}", "--disable-background-networking", "about:blank"]
        self.process = subprocess.Popen(
            [CHROMIUM, *arguments],
            preexec_fn=wire,
            close_fds=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(commands)
        os.close(answers)
        os.close(read_theirs)
        os.close(write_theirs)
        self.reader, self.writer = os.fdopen(read_ours, "rb"), os.fdopen(write_ours, "wb")
        self.numbers, self.session, self.rest = itertools.count(1), None, b""
        (target,) = (t for t in self.send("Target.getTargets")["targetInfos"] if t["type"] == "page")
        attached = self.send("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self.session = attached["sessionId"]
        self.send("Page.enable")
        self.resize(width, height)

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *error: object) -> None:
        self.writer.close()
        self.reader.close()
        self.process.terminate()
        self.process.wait(timeout=30)

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self.numbers)
        message = {"id": number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        self.writer.write(json.dumps(message).encode() + b"\0")
        self.writer.flush()
        while True:
            while b"\0" not in self.rest:
                piece = os.read(self.reader.fileno(), 1 << 20)
                assert piece, "the browser is gone"
                self.rest += piece
            line, _, self.rest = self.rest.partition(b"\0")
            answer = json.loads(line)
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]

    def open(self, path: Path) -> None:
        self.send("Page.navigate", url=path.as_uri())
        while self.evaluate("document.readyState") != "complete" or self.evaluate("location.protocol") != "file:":
            pass

    def evaluate(self, expression: str) -> Any:
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def key(self, name: str) -> None:
        for kind in ("rawKeyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=name, windowsVirtualKeyCode=_KEYS[name])
        if name == " ":
            self.send("Input.dispatchKeyEvent", type="char", key=name, text=name)

    def resize(self, width: int, height: int) -> None:
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def screenshot(self) -> bytes:
        return base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"])
