"""Makes docs/images/dashboard.png: python docs/make_dashboard_image.py RUN (Chromium and chromedriver needed)."""

import sys
import tempfile
from pathlib import Path

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS.parent))

from mmtrain.run_page.page import write_page  # noqa: E402
from tests.browser import browser  # noqa: E402


def main() -> None:
    """Draws the page of a run as a window of 1400 pixels shows it."""
    with tempfile.TemporaryDirectory() as folder, browser() as window:
        page = Path(folder) / "page.html"
        write_page([Path(sys.argv[1])], page)
        window.resize(1400, 1612)
        window.open(page)
        (DOCS / "images" / "dashboard.png").write_bytes(window.screenshot())


if __name__ == "__main__":
    main()
