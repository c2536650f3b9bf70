"""Each page of docs/ in a real browser: nothing is beyond the window's edge, or cut.

It needs Chromium, its driver, Sphinx and selenium: on Debian and Ubuntu
`apt-get install chromium chromium-driver`, and `pip install ".[docs,test]"`.
"""

import importlib.util
import os
import shutil
import subprocess
import sys

import pytest
from installed import ROOT
from pages import PAGES

pytestmark = pytest.mark.slow

NARROW, WIDE = 420, 1400
FEW_COLUMNS = 3  # in a narrow window tables of more columns may scroll by themselves

#: How many pixels the page slides sideways, and what of the text is beyond its edge.
#: What scrolls by itself may be wider: code, and tables of many columns.
OVER_THE_EDGE = """
const root = document.documentElement;
const scrolls = e => ["auto", "scroll"].includes(getComputedStyle(e).overflowX);
const inside = e => { for (let p = e.parentElement; p && p !== document.body;
  p = p.parentElement) if (scrolls(p)) return true; return false; };
const out = [...document.querySelectorAll("article *")].filter(e =>
  e.getClientRects().length && !inside(e)
  && e.getBoundingClientRect().right > root.clientWidth + 1);
return [root.scrollWidth - root.clientWidth, root.clientWidth,
  out.slice(0, 5).map(e => e.outerHTML.slice(0, 120))];
"""

#: Tables of at most so many columns that must be scrolled, and pictures that are cut.
CUT = """
const cut = e => e.scrollWidth > e.clientWidth + 1;
const few = e => e.rows[0].cells.length <= arguments[0];
const beyond = e => e.getBoundingClientRect().right
  > document.documentElement.clientWidth + 1;
const tables = [...document.querySelectorAll("article table")];
const pictures = [...document.querySelectorAll("article img")];
return pictures.filter(beyond).map(e => e.src).concat(tables
  .filter(few).filter(cut)
  .map(e => e.textContent.trim().slice(0, 60)));
"""

#: Blocks of code or output whose lines are wrapped, or that cannot be scrolled.
WRAPPED = """
return [...document.querySelectorAll("article pre")].filter(e => {
  const style = getComputedStyle(e);
  return style.whiteSpace !== "pre" || !["auto", "scroll"].includes(style.overflowX);
}).map(e => e.textContent.slice(0, 60));
"""

#: Nothing that loads, or no words for those who cannot see it.
BROKEN_PICTURES = """
return [...document.querySelectorAll("article img")]
  .filter(e => !e.naturalWidth || !e.alt || e.alt.length < 20).map(e => e.src);
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder of the built pages: LOSSSCALE_PAGES, or made now."""
    if "LOSSSCALE_PAGES" in os.environ:
        return os.environ["LOSSSCALE_PAGES"]
    if importlib.util.find_spec("pydata_sphinx_theme") is None:
        pytest.skip('without pip install ".[docs]" there are no pages')
    folder = str(tmp_path_factory.mktemp("pages"))
    command = [sys.executable, "-m", "sphinx", "--quiet", str(ROOT / "docs"), folder]
    subprocess.run(command, check=True, timeout=600)
    return folder


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    webdriver = pytest.importorskip("selenium.webdriver", reason="no selenium")
    found = shutil.which("chromium") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if not (found and driver):
        pytest.skip("there is no browser: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = found
    profile = tmp_path_factory.mktemp("profile")
    for flag in (
        *("headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run"),
        *("disable-background-networking", "disable-component-update", "disable-sync"),
        *("disable-dev-shm-usage", f"user-data-dir={profile}"),
    ):
        options.add_argument(f"--{flag}")
    service = webdriver.ChromeService(executable_path=driver)
    started = webdriver.Chrome(options=options, service=service)
    yield started
    started.quit()


def show(browser, path, width):
    """Opens a page in a window of that width, which no system's least width limits."""
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get(f"file://{path}")


#: What is looked at in each width: a script, its arguments.
LOOKS = {
    NARROW: [(CUT, FEW_COLUMNS), (WRAPPED,)],
    WIDE: [(CUT, 99), (BROKEN_PICTURES,)],
}


@pytest.mark.parametrize("name", PAGES)
def test_no_page_slides_sideways_and_nothing_is_cut(browser, built, name):
    for width, looks in LOOKS.items():
        show(browser, f"{built}/{name}.html", width)
        slides, seen, beyond = browser.execute_script(OVER_THE_EDGE)
        assert seen > width - 20  # the window is as wide as asked
        assert slides == 0
        assert not beyond
        for look in looks:
            assert not browser.execute_script(*look), (width, look[0])
