"""Opens a self-contained page in headless Chromium, as a reader's browser would: what it says, and which script errors it meets.
`make test-deps` installs the browser where there is a package for it (Debian's chromium-headless-shell); without one, tests marked
@page_test are left out, and say so."""

import os
import shutil
import subprocess

from harness import Failure, folder, test

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "chrome")


BROWSER = next((found for found in (shutil.which(name) for name in (os.environ.get("CHROMIUM") or "", *NAMES) if name) if found), None)


def page_test(function):
    """Marks a test that opens a page."""
    if BROWSER:
        return test(function)
    print(f"left out, no Chromium here: {function.__name__}", flush=True)
    return function


def chromium(path, *options):
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", f"--user-data-dir={folder('chromium')}", "--hide-scrollbars",
               "--enable-logging=stderr", "--virtual-time-budget=3000", *options, "file://" + os.path.abspath(path)]
    result = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=120)
    if result.returncode != 0:
        raise Failure(f"{' '.join(command)}: exit code {result.returncode}: {result.stderr.strip()[-600:]}")
    errors = [line for line in result.stderr.splitlines() if "CONSOLE" in line or "Uncaught" in line]
    return result.stdout, errors


def open_page(path):
    """(the page as its scripts have made it, what they complained about)"""
    return chromium(path, "--dump-dom")


def picture(path, png, width=1240, height=3000):
    """The page as a PNG file."""
    return chromium(path, f"--screenshot={os.path.abspath(png)}", f"--window-size={width},{height}")[1]
