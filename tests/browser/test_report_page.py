"""The page of a report in a real browser: numbers, zoom, pan, search, hover, themes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tessera.plan.changes import Change
from tessera.plan.dearest import Share
from tessera.plan.reports import Memory, Report
from tessera.plan.timeline import Event, StageTime, Timeline, Traffic
from tests.browser.devtools import Page, browser

pytestmark = pytest.mark.skipif(
    browser() is None, reason="no browser: apt-get install chromium-headless-shell"
)
STAGES, STEPS, EACH_S = 4, 1500, 1e-4  # 12,000 events
HIT = {"light": (208, 36, 95), "dark": (255, 107, 157)}


def made() -> Report:
    """A report with a computation and a collective in each stage and step."""
    events: list[Event] = []
    for stage in range(STAGES):
        for i in range(STEPS):
            t, scope = i * EACH_S, f"layers/block{i % 7}/mlp"
            events += [
                Event("compute", "compute", stage, ("compute",), t, t + 0.9 * EACH_S, (), 1 << 20,
                      10**9, f"model.py:{i % 7 + 10}", scope),
                Event("all_reduce", "collective", stage, ("gpu",), t + EACH_S / 2, t + EACH_S,
                      ("tp",), 1 << 16, 0, f"model.py:{i % 7 + 10}", scope),
            ]  # fmt: skip
    step_s = STEPS * EACH_S
    stages = tuple(StageTime(i, 8, 0.9 * step_s, 0.05 * step_s, 0.05 * step_s, 10**12)
                   for i in range(STAGES))  # fmt: skip
    traffic = tuple(Traffic(i, "all_reduce", ("tp",), ("gpu",), STEPS, 1 << 26, step_s / 2,
                            0.05 * step_s) for i in range(STAGES))  # fmt: skip
    line = Timeline("step </script>", 32, step_s, tuple(events), stages, traffic, 989e12)
    share = Share(0, "all_reduce tp", "layers", "model.py:10", STEPS, 0.01, 0.001, 1 << 26, 0)
    return Report(
        line.name, "pp=4 tp=8", "toy, 32 devices", line, 4096, 10**14, 1e12, 2.5,
        tuple(Memory(i, {"weights": 10 << 30, "batch": 1 << 20}, 80 << 30) for i in range(STAGES)),
        (share,), (share,), (Change("half the bubble", "microbatches=", step_s * 0.9, 0.1),),
    )  # fmt: skip


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    folder = tmp_path_factory.mktemp("browser")
    made().save_html(folder / "report.html")
    page = Page(folder / "profile")
    try:
        page.send("Emulation.setEmulatedMedia", features=[scheme("light")])
        page.open(folder / "report.html")
        yield page
    finally:
        page.close()


def scheme(name: str) -> dict[str, str]:
    return {"name": "prefers-color-scheme", "value": name}


@pytest.fixture(autouse=True)
def at_first(page: Page) -> None:
    """The whole step, and no search."""
    search(page, "")
    page.run("document.getElementById('all').click(); scrollTo(0, 0)")
    page.drawn()


def search(page: Page, words: str) -> None:
    page.run(f"{{ const s = document.getElementById('search'); s.value = {json.dumps(words)};"
             " s.dispatchEvent(new Event('input')); }")  # fmt: skip
    page.drawn()


def view(page: Page) -> tuple[float, float]:
    found = page.run("[view.from, view.to]")
    return found[0], found[1]


def middle(page: Page) -> tuple[float, float]:
    """A point in the middle of the timeline, on the first lane."""
    page.run("document.getElementById('lanes').scrollIntoView({block: 'center'})")
    page.drawn()
    box: Any = page.run(
        "(() => { const r = document.getElementById('timeline').getBoundingClientRect();"
        " return [r.left, r.top, r.width, r.height]; })()"
    )
    return box[0] + 130 + (box[2] - 130) / 2, box[1] + 30


def pixels(page: Page, color: tuple[int, int, int]) -> int:
    """The number of pixels of the timeline in this color."""
    count: int = page.run(
        "(() => { const c = document.getElementById('timeline'), d = c.getContext('2d')"
        ".getImageData(0, 0, c.width, c.height).data; let n = 0;"
        " for (let i = 0; i < d.length; i += 4)"
        f" if (d[i] === {color[0]} && d[i + 1] === {color[1]} && d[i + 2] === {color[2]}) n++;"
        " return n; })()"
    )
    return count


def test_it_loads_without_errors_and_without_a_network(page: Page) -> None:
    assert page.problems == []
    assert {url.split(":")[0] for url in page.requests} <= {"file", "data"}
    assert page.run("document.querySelectorAll('h2').length") == 7
    assert page.run("document.getElementById('name').textContent") == "step </script>"


def test_numbers_are_those_of_the_json(page: Page) -> None:
    found = json.loads(made().json())
    for key in ("step_s", "tokens_per_s", "mfu", "compute_s", "exposed_s", "hidden_s", "bubble",
                "days", "cost"):  # fmt: skip
        value = page.run(f"Number(document.getElementById('card-{key}').dataset.value)")
        assert value == pytest.approx(found[key], rel=1e-12)
    assert page.run("Number(document.getElementById('card-peak').dataset.value)") == max(
        m["peak"] for m in found["memory"]
    )
    text = page.run("document.getElementById('card-step_s').textContent")
    assert text == f"{found['step_s'] * 1e3:.2f} ms"
    for part, rows in (("changes", 1), ("memory", STAGES), ("traffic", STAGES), ("layers", 1)):
        assert page.run(f"document.querySelectorAll('#{part} tbody tr').length") == rows


def test_the_wheel_zooms_at_the_pointer(page: Page) -> None:
    x, y = middle(page)
    first, last = view(page)
    page.mouse("mouseWheel", x, y, deltaX=0, deltaY=-300)
    near, far = view(page)
    assert far - near == pytest.approx((last - first) / 2.718281828, rel=1e-3)
    assert (near + far) / 2 == pytest.approx((first + last) / 2, rel=1e-2)
    assert page.run("document.getElementById('range').textContent") != "0.0 µs to 150.00 ms"
    page.mouse("mouseWheel", x, y, deltaX=0, deltaY=300)
    page.mouse("mouseWheel", x, y, deltaX=0, deltaY=300)
    assert view(page) == pytest.approx((first, last))


def test_dragging_pans(page: Page) -> None:
    page.run("document.getElementById('in').click()")
    x, y = middle(page)
    before = view(page)
    page.mouse("mousePressed", x, y, button="left", buttons=1, clickCount=1)
    page.mouse("mouseMoved", x - 100, y, button="left", buttons=1)
    page.mouse("mouseReleased", x - 100, y, button="left", clickCount=1)
    after = view(page)
    assert after[0] > before[0]
    assert after[1] - after[0] == pytest.approx(before[1] - before[0])


def test_a_search_marks_events(page: Page) -> None:
    assert pixels(page, HIT["light"]) == 0
    search(page, "model.py:12")
    hits = sum("model.py:12" in e.at for e in made().timeline.events)
    assert page.run("document.getElementById('hits').textContent").startswith(f"{hits:,} events")
    few = pixels(page, HIT["light"])
    assert few > 0
    search(page, "ALL_REDUCE")
    assert pixels(page, HIT["light"]) > few
    search(page, "")
    assert pixels(page, HIT["light"]) == 0


def test_the_pointer_shows_details(page: Page) -> None:
    page.run("show(0, 1e-4)")
    x, y = middle(page)
    page.mouse("mouseMoved", x, y)
    assert page.run("getComputedStyle(document.getElementById('tip')).display") == "block"
    text = page.run("document.getElementById('tip').textContent")
    assert "layers/block0/mlp" in text and "model.py:10" in text and "1.0 GFLOP" in text


def test_twelve_thousand_events_are_drawn_at_once(page: Page) -> None:
    assert page.run("events.length") == 2 * STAGES * STEPS
    took_ms = page.run("(() => { const t = performance.now(); draw(); return performance.now() - t;"
                       " })()")  # fmt: skip
    assert took_ms < 500  # about 20 on one core


def test_both_themes_have_their_colors(page: Page) -> None:
    back = "getComputedStyle(document.body).backgroundColor"
    light = page.run(back)
    page.send("Emulation.setEmulatedMedia", features=[scheme("dark")])
    page.drawn()
    search(page, "model.py:12")
    assert page.run(back) != light
    assert pixels(page, HIT["dark"]) > 0
    page.run("document.getElementById('theme').click()")
    page.drawn()
    assert page.run(back) == light
    page.run("document.getElementById('theme').click()")
    page.send("Emulation.setEmulatedMedia", features=[scheme("light")])
    page.run("document.documentElement.style.colorScheme = ''")
    page.drawn()


def test_a_report_without_communication(tmp_path: Path) -> None:
    whole = made()
    line = replace(whole.timeline, events=whole.timeline.events[:1], traffic=())
    small = replace(whole, timeline=line, collectives=(), changes=(), tokens=None)
    small.save_html(tmp_path / "small.html")
    page = Page(tmp_path / "profile")
    try:
        page.open(tmp_path / "small.html")
        assert page.problems == []
        assert page.run("document.getElementById('collectives').textContent") == "none"
    finally:
        page.close()
