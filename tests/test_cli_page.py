"""The report page: what it draws, and that it works in a browser without a network."""

from __future__ import annotations

import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest

from fusion.drawing import kind_of, svg
from tests.cli import MODELS, run

LINES = (
    "%mul : [num_users=1] = call_function[target=torch.ops.aten.mul.Tensor](args = (%x, %w), "
    "kwargs = {})",
    "%add : [num_users=1] = call_function[target=torch.ops.aten.add.Tensor](args = (%mul, 1), "
    "kwargs = {})",
)


class Checked(HTMLParser):
    """Every tag that is opened is closed, in order."""

    VOID = ("meta", "br", "input", "path", "rect", "link", "img")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict]] = []

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.fixture
def page(capsys, tmp_path):
    file = tmp_path / "page.html"
    assert run(capsys, "explain", f"{MODELS}:mixed", "--html", str(file)).status == 0
    return file


def test_a_drawing_has_a_box_for_each_node_and_input():
    text = svg(LINES, {"mul": "q norm"}, "a <b>")
    assert text.count("<rect") == 4  # x, w, mul, add
    assert 'class="node-q-norm"' in text
    assert text.count('class="node-input"') == 2
    assert text.count('class="edge"') == 3
    assert "a &lt;b&gt;" in text
    assert "aten.mul.Tensor" in text
    assert svg((), {}, "nothing") == ""


def test_nodes_stand_below_what_they_read():
    tops = dict(
        re.findall(r"<title>(\w+):[^<]*</title><rect x=\"\d+\" y=\"(\d+)\"", svg(LINES, {}, "t"))
    )
    assert int(tops["x"]) < int(tops["mul"]) < int(tops["add"])


def test_names_in_a_drawing_are_escaped():
    evil = "%a : = call_function[target=<script>alert(1)</script>](args = (%b,), kwargs = {})"
    assert "<script" not in svg((evil,), {"a": '"><script>'}, "t")
    assert kind_of('"><script>') == "script"


def test_the_page_is_well_formed_and_asks_for_nothing(page):
    text = page.read_text("utf-8")
    parser = Checked()
    parser.feed(text)
    assert parser.open == []
    assert not [a for _, a in parser.seen if "src" in a]
    assert [a for t, a in parser.seen if t == "link"] == []
    assert "default-src 'none'" in text
    hrefs = {a["href"][1:] for t, a in parser.seen if t == "a"}
    assert hrefs <= {a.get("id") for _, a in parser.seen}


def test_the_page_shows_sites_lines_and_both_drawings(page):
    text = page.read_text("utf-8")
    for expected in ("match.rope-sign", "mean over heads", "<h3>before</h3>", "<h3>after</h3>"):
        assert expected in text
    for kind in ("node-q-norm", "node-k-norm", "node-q-rope", "node-k-rope", "node-fused"):
        assert f'class="{kind}"' in text
    assert "prefers-color-scheme: dark" in text


def test_the_page_repeats_no_place_has_no_empty_label_and_reads_nodes(page, capsys, tmp_path):
    text = page.read_text("utf-8")
    assert not re.search(r'<span class="key[^>]*></span>', text)
    assert "- cat = aten.cat([sub, add_2], -1)" in text and "num_users" not in text
    file = tmp_path / "refused.html"
    ask = ["explain", f"{MODELS}:one", "--target", "sm_90", "--kernels", "aiter"]
    assert run(capsys, *ask, "--html", str(file)).status == 0
    refused = file.read_text("utf-8").partition("<h3>kernels</h3>")[0]
    assert refused.count("<code>gate.") > 1
    assert refused.count('<pre class="code">') == 1


def in_browser(page, folder, script, size="1200,1600"):
    """The page's DOM after a script ran in it, with the page's own policy in force."""
    page.write_text(page.read_text("utf-8").replace("</body>", f"<script>{script}</script></body>"))
    flags = "--headless --no-sandbox --disable-gpu --disable-background-networking --no-first-run"
    command = ["chromium", *flags.split(), f"--window-size={size}", "--dump-dom"]
    command += [f"--user-data-dir={folder / 'profile'}", page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
@pytest.mark.parametrize("size", ["420,1600", "660,1600", "1200,1600"])
def test_short_words_in_tables_stay_on_one_line(page, tmp_path, size):
    page.write_text(page.read_text("utf-8").replace(">explain/", ">a-longer-name-of-a-graph/"))
    text = in_browser(
        page,
        tmp_path,
        "function most(where, measure) { return Math.max.apply(null, Array.from("
        "document.querySelectorAll(where)).map(measure)); }"
        "function lines(cell) { var r = document.createRange(); r.selectNodeContents(cell);"
        "return r.getClientRects().length; }"
        'document.title = [most(".nodes tr", function (e) { return e.offsetHeight; }),'
        'most(".sites td:last-child", lines)].join(" ");',
        size,
    )
    title = re.search(r"<title>(\d+) (\d+)</title>", text)
    assert title is not None
    height, lines = map(int, title.groups())
    assert 10 < height < 45
    assert lines == (0 if size.startswith("420") else 1)  # no room for the graph on a telephone


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
def test_the_search_filters_in_a_browser(page, tmp_path):
    """The search box hides the rows that do not match."""
    text = in_browser(
        page,
        tmp_path,
        'var b=document.getElementById("search");b.value="layers.2 partial";'
        'b.dispatchEvent(new Event("input"));',
    )
    shown = re.search(r'id="shown"[^>]*>([^<]*)<', text)
    assert shown is not None
    assert re.fullmatch(r"1 of \d+", shown[1]), shown[1]
    rows = re.findall(r"<tr( hidden=\"\")?><td><a href", text)
    assert sum(not hidden for hidden in rows) == 1
