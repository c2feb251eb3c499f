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


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
def test_the_search_filters_in_a_browser(page, tmp_path):
    """The search box hides the rows that do not match, with the page's own policy in force."""
    probe = (
        '<script>var b=document.getElementById("search");b.value="layers.2 partial";'
        'b.dispatchEvent(new Event("input"));</script></body>'
    )
    page.write_text(page.read_text("utf-8").replace("</body>", probe), "utf-8")
    flags = "--headless --no-sandbox --disable-gpu --disable-background-networking --no-first-run"
    command = ["chromium", *flags.split(), f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom"]
    ran = subprocess.run(
        [*command, page.as_uri()], capture_output=True, text=True, timeout=120, check=True
    )
    shown = re.search(r'id="shown"[^>]*>([^<]*)<', ran.stdout)
    assert shown is not None
    assert re.fullmatch(r"1 of \d+", shown[1]), shown[1]
    rows = re.findall(r"<tr( hidden=\"\")?><td><a href", ran.stdout)
    assert sum(not hidden for hidden in rows) == 1
