"""browser.py: controls a headless Chromium through its debugging pipe, without a driver or network. For tests."""

import base64
import fcntl
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time


def find():
    return next(
        (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
    )


class Browser:
    """with Browser() as b: b.open(path); b.run('1 + 1'); b.screenshot('x.png'). `errors`: script exceptions."""

    def __init__(self, width=1280, height=900, dark=False):
        self.width, self.height, self.dark = width, height, dark

    def __enter__(self):
        self.profile = tempfile.mkdtemp()
        there, self.write = os.pipe()
        self.read, back = os.pipe()

        def pipes():  # the browser reads commands from 3 and answers on 4
            # Copies with numbers above 4, because dup2 of a number to itself does not clear close-on-exec.
            a, b = (fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 5) for end in (there, back))
            os.dup2(a, 3)
            os.dup2(b, 4)

        self.process = subprocess.Popen(
            [
                find(),
                "--headless=new",
                "--no-sandbox",
                "--disable-gpu",
                "--remote-debugging-pipe",
                "--no-first-run",
                "--disable-extensions",
                f"--user-data-dir={self.profile}",
                f"--window-size={self.width},{self.height}",
                "about:blank",
            ],
            preexec_fn=pipes,
            close_fds=False,
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(there)
        os.close(back)
        self.buffer, self.next, self.events, self.errors, self.requests, self.session = b"", 0, [], [], [], None
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network"):
            self.send(f"{domain}.enable")
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=self.width,
            height=self.height,
            deviceScaleFactor=1,
            mobile=False,
        )
        self.color_scheme(self.dark)
        return self

    def __exit__(self, *_):
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        os.close(self.write)
        os.close(self.read)
        deadline = time.time() + 10  # its child processes may still write to the profile
        while os.path.exists(self.profile) and time.time() < deadline:
            shutil.rmtree(self.profile, ignore_errors=True)
            time.sleep(0.02)

    def message(self):
        while b"\0" not in self.buffer:
            data = os.read(self.read, 1 << 20)
            if not data:
                raise RuntimeError("the browser exited")
            self.buffer += data
        text, self.buffer = self.buffer.split(b"\0", 1)
        return json.loads(text)

    def send(self, method, **parameters):
        self.next += 1
        command = {
            "id": self.next,
            "method": method,
            "params": parameters,
            **({"sessionId": self.session} if self.session else {}),
        }
        data = json.dumps(command).encode() + b"\0"
        while data:
            data = data[os.write(self.write, data) :]
        while True:
            m = self.message()
            if m.get("id") == self.next:
                if "error" in m:
                    raise RuntimeError(f"{method}: {m['error']}")
                return m["result"]
            self.note(m)

    def note(self, m):
        self.events.append(m.get("method"))
        if m.get("method") == "Runtime.exceptionThrown":
            details = m["params"]["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description", details["text"]))
        if m.get("method") == "Network.requestWillBeSent":
            self.requests.append(m["params"]["request"]["url"])

    def color_scheme(self, dark):
        self.send(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}],
        )

    def open(self, place):
        """Opens a file, or an address that begins with http://."""
        self.events.clear()
        here = str(place).startswith("http://")
        self.send("Page.navigate", url=str(place) if here else f"file://{os.path.abspath(place)}")
        self.wait()

    def wait(self):
        while "Page.loadEventFired" not in self.events:
            self.note(self.message())
        painted = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done, 100))))"
        while True:
            try:
                return self.run(painted)
            except RuntimeError as error:  # of a page that reloads itself
                if "navigated" not in str(error):
                    raise

    def run(self, expression):
        """The value of an expression in the page; a promise is awaited."""
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(
                answer["exceptionDetails"].get("exception", {}).get("description", "exception without description")
            )
        return answer["result"].get("value")

    def mouse(self, x, y, click=False):
        self.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        for kind in ("mousePressed", "mouseReleased") if click else ():
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def drag(self, begin, end):
        self.mouse(*begin)
        for kind, (x, y) in (("mousePressed", begin), ("mouseMoved", end), ("mouseReleased", end)):
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", buttons=1, clickCount=1)

    def middle(self, selector):
        """Scrolls an element into view, and returns the position of its centre."""
        return self.run(
            "(e => { e.scrollIntoView({block: 'center'}); const b = e.getBoundingClientRect();"
            " return [b.left + b.width / 2, b.top + b.height / 2]; })"
            f"(document.querySelector({json.dumps(selector)}))"
        )

    def click(self, selector):
        self.mouse(*self.middle(selector), click=True)

    def screenshot(self, path, whole=False):
        clip = {}
        if whole:
            size = self.send("Page.getLayoutMetrics")["cssContentSize"]
            clip = {
                "clip": {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1},
                "captureBeyondViewport": True,
            }
        with open(path, "wb") as f:
            f.write(base64.b64decode(self.send("Page.captureScreenshot", format="png", **clip)["data"]))
