"""A page in a headless Chromium, for the tests of pages."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

BROWSER = next(filter(None, map(shutil.which, (
    "chromium", "chromium-browser", "google-chrome", "chrome"))), None)
needs_browser = pytest.mark.skipif(not BROWSER, reason="needs a Chromium")


def seen_in_browser(page: Path, *options: str) -> tuple[str, list[str]]:
    """(the page as it stands after its scripts, what they wrote on the console)."""
    done = subprocess.run(
        [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
         "--disable-background-networking", "--disable-component-update", "--disable-sync",
         f"--user-data-dir={page.parent / 'profile'}", "--enable-logging=stderr", *options,
         "--dump-dom", page.as_uri()], capture_output=True, text=True, timeout=300)
    return done.stdout, re.findall(r"CONSOLE.*", done.stderr)
