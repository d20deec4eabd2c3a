"""browser.py: a headless Chromium for the tests of the pages, controlled by Selenium and the system's chromedriver
(scripts/install_deps.sh --with-browser). Requires the environment `tests` of scripts/python_environment.py."""

import json
import os
import shutil

from selenium import webdriver
from selenium.common.exceptions import WebDriverException
from selenium.webdriver.common.actions.action_builder import ActionBuilder

Failed = WebDriverException
PAINTED = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done, 100))))"


class Browser:
    """with Browser() as b: b.open(path); b.run('1 + 1'); b.screenshot('x.png')."""

    def __init__(self, width=1280, height=900):
        self.size = {"width": width, "height": height}

    def __enter__(self):
        options = webdriver.ChromeOptions()
        names = ("chromium", "chromium-browser", "google-chrome")
        options.binary_location = next(path for name in names if (path := shutil.which(name)))
        for word in ("headless=new", "no-sandbox", "disable-gpu", "disable-extensions"):
            options.add_argument(f"--{word}")
        options.set_capability("goog:loggingPrefs", {"browser": "SEVERE", "performance": "ALL"})
        self.driver = webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver")))
        self.send("Emulation.setDeviceMetricsOverride", **self.size, deviceScaleFactor=1, mobile=False)
        self.color_scheme(False)
        return self

    def __exit__(self, *_):
        self.driver.quit()

    def send(self, command, **parameters):
        """A command of the DevTools protocol."""
        return self.driver.execute_cdp_cmd(command, parameters)

    def color_scheme(self, dark):
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, place):
        """Opens a file, or an address that begins with http://, and waits until it is painted."""
        place = str(place)
        self.driver.get(place if place.startswith("http://") else f"file://{os.path.abspath(place)}")
        self.run(PAINTED)

    def run(self, expression):
        """The value of an expression in the page; a promise is awaited."""
        return self.driver.execute_script(f"return ({expression})")

    def errors(self):
        """Exceptions of scripts, and what could not be loaded, since the last call."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requests(self):
        """The addresses that pages have requested since the last call."""
        events = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        return [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]

    def mouse(self, place, to=None, press=True):
        """Moves to a place (x, y) and presses there; with `to`, drags to that place."""
        actions = ActionBuilder(self.driver, duration=20)
        pointer = actions.pointer_action.move_to_location(*map(round, place))
        if press:
            pointer.pointer_down()
            if to:
                pointer.move_to_location(*map(round, to))
            pointer.pointer_up()
        actions.perform()

    def middle(self, selector):
        """Scrolls an element into view, and returns the position of its centre."""
        return self.run(
            "(e => { e.scrollIntoView({block: 'center'}); const b = e.getBoundingClientRect();"
            " return [b.left + b.width / 2, b.top + b.height / 2]; })"
            f"(document.querySelector({json.dumps(selector)}))"
        )

    def click(self, selector):
        self.mouse(self.middle(selector))

    def screenshot(self, path):
        self.driver.save_screenshot(str(path))
