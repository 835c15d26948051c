"""Makes docs/images/run_page.png and dashboard.png: python docs/make_dashboard_image.py RUN (Chromium, chromedriver).

The first is the top of a run's page, up to its timeline, for the README; the second shows more of it.
"""

import sys
import tempfile
from pathlib import Path

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS.parent))

from mmtrain.run_page.page import write_page  # noqa: E402
from tests.browser import browser  # noqa: E402

WINDOWS = {"run_page": (1040, 815, 1.5), "dashboard": (1400, 1500, 1.0)}
"""Name of an image -> width and height of the window, and pixels of the image for each of them."""


def main() -> None:
    """Draws the page of a run."""
    with tempfile.TemporaryDirectory() as folder, browser() as window:
        page = Path(folder) / "page.html"
        write_page([Path(sys.argv[1])], page)
        for name, (width, height, scale) in WINDOWS.items():
            metrics = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": False}
            window._command("Emulation.setDeviceMetricsOverride", metrics)
            window.open(page)
            (DOCS / "images" / f"{name}.png").write_bytes(window.screenshot())


if __name__ == "__main__":
    main()
