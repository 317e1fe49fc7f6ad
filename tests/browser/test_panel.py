"""The live panel in JupyterLab, over scripted runs: what a person sees, presses and saves."""

from __future__ import annotations

import json
import re
import time
from urllib.parse import urlsplit

import pytest
from lab import ARTIFACTS
from playwright.sync_api import expect

from tests.patience import best, until

WATCH = """import scripted
from tfmagic.views import live
scripted.tell_when_heard()
handle = scripted.Handle({name!r}, {speed}, {hold})
panel = live.watch(handle, background={background})
run = handle.record
"""
REPORT = """import json
print(json.dumps({
    "status": run.status, "ended": run.created + run.total_ms / 1e3, "ms": run.total_ms, "frames": panel.frames,
    "heard": panel.heard, "open": len(live._open), "kept": len(live._kept)}))
"""


def watch(name: str, speed: float = 1.0, background: bool = False, hold: tuple[str, ...] = ("decoding",)) -> str:
    """A cell that watches a scripted run, which is held in these phases until the book says `go`."""
    return WATCH.format(name=name, speed=speed, background=background, hold=hold)


def report(book, i: int) -> dict:
    """Run the reporting cell i."""
    book.run(i)
    return json.loads(book.text(i))


def report_of_an_end(book, i: int) -> dict:
    """The same, once the page has told the kernel that no view of the panel is left."""
    until(lambda: report(book, i)["kept"] == 0)
    return report(book, i)


def mimes(book, i: int) -> list[list[str]]:
    return [sorted(output["data"]) for output in book.outputs(i) if "data" in output]


def picture(page, name: str) -> None:
    ARTIFACTS.mkdir(exist_ok=True)
    page.screenshot(path=ARTIFACTS / name)


def boxes_of(panel, selector: str) -> list[dict]:
    """Where the elements stand, all at one moment: the panel grows."""
    return panel.evaluate(
        "(el, s) => [...el.querySelectorAll(s)].map(x => x.getBoundingClientRect().toJSON())", selector
    )


CARD = [["text/html", "text/plain"]]


def test_the_run_is_seen_while_it_goes_on_and_leaves_a_card(notebook, page):
    book = notebook(watch("long"), REPORT)
    book.run(0, wait=False)
    panel = book.panel(0)
    expect(panel).to_have_attribute("data-status", "decoding")
    more = "n => +document.querySelector('.tfm').dataset.tokens > n"
    for _ in range(3):
        page.wait_for_function(more, arg=int(panel.get_attribute("data-tokens")))
    assert "kite" in panel.get_by_test_id("tfm-text-0").inner_text()
    picture(page, "panel_light.png")
    book.go("decoding")
    book.idle(0)
    expect(panel).to_have_count(0)
    assert mimes(book, 0) == CARD
    expect(book.cell(0)).to_contain_text("white dog that looks up at them")
    picture(page, "card_light.png")
    told = report_of_an_end(book, 1)
    assert told["status"] == "done"
    assert 3 < told["frames"] <= 20 * told["ms"] / 1e3 + 3
    assert (told["open"], told["kept"]) == (0, 0), "the page said that the view is gone, and the widget was closed"
    saved = book.save()
    assert "widgets" not in saved["metadata"]
    assert sorted(saved["cells"][0]["outputs"][0]["data"]) == ["text/html", "text/plain"]
    assert "live.js" not in book.path.read_text() and "model_id" not in book.path.read_text()


def stopped(book, page, heard: bool) -> float:
    """Run the cell and press Stop: the seconds until the run has ended."""
    book.run(0, wait=False)
    expect(book.panel(0)).to_have_attribute("data-status", "decoding")
    if heard:
        book.heard()
    page.wait_for_timeout(400)
    pressed = time.time()
    book.panel(0).get_by_test_id("tfm-stop").click()
    book.idle(0)
    told = report(book, 1)
    assert told["status"] == "stopped" and told["heard"] == heard
    assert mimes(book, 0) == CARD
    return told["ended"] - pressed


def test_stop_takes_effect_within_a_second(notebook, page):
    book = notebook(watch("long"), REPORT)
    best(lambda: stopped(book, page, heard=True), 1.0)
    assert not [o for o in book.outputs(0) if o["output_type"] in ("error", "stream")], "nothing is printed by stopping"


def test_stop_interrupts_where_the_control_comm_is_not_heard(notebook, page):
    deaf = """import scripted
from tfmagic.views import live
live._listen = lambda: None
handle = scripted.Handle("long", hold=("decoding",))
run, panel = handle.record, live.Panel(handle)
try:
    panel.run()
except KeyboardInterrupt:
    handle.cancel()
    handle.wait(60)
finally:
    panel.finish()
"""
    book = notebook(deaf, REPORT)
    best(lambda: stopped(book, page, heard=False), 1.0)


def test_stop_and_ghosts_by_keyboard(notebook, page):
    book = notebook(watch("long"), REPORT)
    book.run(0, wait=False)
    panel = book.panel(0)
    expect(panel).to_have_attribute("data-status", "decoding")
    book.heard()
    expect(panel.locator("del").first).to_be_attached()
    expect(panel.locator("del").first).to_be_hidden()
    panel.locator(".tfm-about").click()
    at = "() => document.activeElement?.dataset.testid ?? ''"
    reached = []
    for _ in range(5):
        page.keyboard.press("Tab")
        reached.append(page.evaluate(at))
        if reached[-1] == "tfm-text-0":
            break
    assert reached[-3:] == ["tfm-stop", "tfm-ghosts", "tfm-text-0"]
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Space")
    expect(panel.get_by_test_id("tfm-ghosts")).to_have_attribute("aria-pressed", "true")
    expect(panel.locator("del").first).to_be_visible()
    picture(page, "panel_ghosts.png")
    page.keyboard.press("Shift+Tab")
    assert page.evaluate(at) == "tfm-stop"
    page.keyboard.press("Enter")
    book.idle(0)
    assert report(book, 1)["status"] == "stopped"


def test_the_status_line_is_not_chatty(notebook, page):
    book = notebook(watch("cold", 1.5, hold=("queued", "prefill", "decoding")))
    page.evaluate(
        """() => { window.said = []; window.listener = new MutationObserver(() => {
            const line = document.querySelector('.tfm [role=status]')?.textContent;
            if (line && line !== said.at(-1)) said.push(line);
        }); listener.observe(document.body, {subtree: true, childList: true, characterData: true}) }"""
    )
    book.run(0, wait=False)
    for phase, line in (("queued", "Queued"), ("prefill", "Reading the prompt"), ("decoding", "Replying")):
        page.wait_for_function("line => said.at(-1) === line", arg=line)
        page.wait_for_timeout(400)
        book.go(phase)
    book.idle(0)
    said = page.evaluate("() => { listener.disconnect(); return said }")
    assert said[:3] == ["Queued", "Reading the prompt", "Replying"] and len(said) <= 4


def test_the_prompt_is_drawn_as_it_is_computed(notebook, page):
    book = notebook(watch("cold", 0.8, hold=("encode", "prefill", "decoding")))
    book.run(0, wait=False)
    panel = book.panel(0)
    expect(panel).to_have_attribute("data-status", "prefill")
    expect(panel).to_contain_text("s and counting")
    strip = panel.locator(".tfm-strip")
    expect(strip).to_have_attribute(
        "aria-label", re.compile(r"4203 rows: 0 from cache, 0 computed, \d+ to do; 2 pictures")
    )
    book.go("encode")
    page.wait_for_function("() => +document.querySelector('.tfm-strip').ariaLabel.match(/(\\d+) computed/)[1] > 0")
    expect(panel.locator(".tfm-picture")).to_have_count(2)
    expect(panel.locator(".tfm-picture").first).to_contain_text("encoded")
    expect(panel).to_contain_text("no kept state matched; 4,203 rows to compute · parts from chat “kites”, turn 2")
    picture(page, "panel_prefill.png")
    book.go("prefill")
    expect(panel).to_have_attribute("data-status", "decoding")
    expect(panel).to_contain_text("prefill 143")
    book.go("decoding")
    book.idle(0)


def test_four_streams_stand_side_by_side(notebook, page):
    book = notebook(watch("four", 0.3))
    book.run(0, wait=False)
    panel = book.panel(0)
    expect(panel).to_have_attribute("data-status", "decoding")
    until(lambda: all(len(panel.get_by_test_id(f"tfm-text-{i}").inner_text()) > 10 for i in range(4)))
    boxes = boxes_of(panel, ".tfm-stream")
    assert boxes[0]["y"] == boxes[1]["y"] < boxes[2]["y"] == boxes[3]["y"] and boxes[0]["x"] < boxes[1]["x"]
    panel.evaluate("el => el.scrollIntoView()")
    picture(page, "panel_4streams.png")
    book.go("decoding")
    book.idle(0)


def test_narrow(notebook, page):
    book = notebook(watch("two", 0.4))
    page.set_viewport_size({"width": 716, "height": 1300})
    try:
        book.run(0, wait=False)
        panel = book.panel(0)
        expect(panel).to_have_attribute("data-status", "decoding")
        until(lambda: all(len(panel.get_by_test_id(f"tfm-text-{i}").inner_text()) > 10 for i in range(2)))
        page.wait_for_timeout(700)
        assert 520 < panel.bounding_box()["width"] <= 605
        boxes = boxes_of(panel, ".tfm-tiles > div")
        assert boxes[0]["y"] == boxes[1]["y"] < boxes[2]["y"] == boxes[3]["y"]
        streams = boxes_of(panel, ".tfm-stream")
        assert streams[0]["x"] == streams[1]["x"] and streams[0]["y"] < streams[1]["y"]
        edge = panel.evaluate(
            "el => Math.max(...[...el.querySelectorAll('*')].map(x => x.getBoundingClientRect().right))"
        )
        assert edge <= panel.bounding_box()["x"] + panel.bounding_box()["width"] + 1, "nothing sticks out"
        assert panel.get_by_test_id("tfm-stop").bounding_box()["height"] < 30, "the button stays on one line"
        picture(page, "panel_600.png")
        book.go("decoding")
        book.idle(0)
    finally:
        page.set_viewport_size({"width": 1240, "height": 1000})


CONTRAST = """el => {
    const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
    const rgb = colour => {
        canvas.clearRect(0, 0, 1, 1);
        canvas.fillStyle = colour;
        canvas.fillRect(0, 0, 1, 1);
        return [...canvas.getImageData(0, 0, 1, 1).data];
    };
    const linear = v => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
    const luminance = ([r, g, b]) => .2126 * linear(r / 255) + .7152 * linear(g / 255) + .0722 * linear(b / 255);
    const ground = e => {
        while (rgb(getComputedStyle(e).backgroundColor)[3] < 255) e = e.parentElement;
        return rgb(getComputedStyle(e).backgroundColor);
    };
    return Object.fromEntries(['.tfm-about', '.tfm-key', '.tfm-cap', '.tfm-value', '.tfm-text', 'figcaption', 'button',
        '.tfm-text mark:not(.c)', '.tfm-text mark.c', '.tfm-text del'].map(name => {
        const e = el.querySelector(name);
        const [bright, dark] = [rgb(getComputedStyle(e).color), ground(e)].map(luminance).sort((x, y) => y - x);
        return [name, (bright + .05) / (dark + .05)];
    }));
}"""


@pytest.mark.parametrize("theme", ["JupyterLab Light", "JupyterLab Dark"])
def test_every_word_can_be_read_in(notebook, page, theme):
    book = notebook(watch("warm", 0.5))
    page.evaluate("theme => jupyterapp.commands.execute('apputils:change-theme', {theme})", theme)
    try:
        page.wait_for_function("dark => (document.body.dataset.jpThemeLight === 'false') === dark", arg="Dark" in theme)
        book.run(0, wait=False)
        panel = book.panel(0)
        expect(panel.locator(".tfm-text mark.c").first).to_be_attached()
        expect(panel.locator("del").first).to_be_attached()
        contrast = panel.evaluate(CONTRAST)
        assert min(contrast.values()) >= 4.5, contrast
        if "Dark" in theme:
            picture(page, "panel_dark.png")
        book.go("decoding")
        book.idle(0)
        if "Dark" in theme:
            page.wait_for_timeout(200)
            picture(page, "card_dark.png")
    finally:
        page.evaluate("() => jupyterapp.commands.execute('apputils:change-theme', {theme: 'JupyterLab Light'})")


def test_a_failed_run_says_why(notebook):
    book = notebook(watch("failed", hold=()), REPORT)
    book.run(0)
    assert report(book, 1)["status"] == "failed"
    expect(book.cell(0)).to_contain_text("ran out of memory")
    assert mimes(book, 0) == CARD


def test_a_run_that_is_over_at_once_gets_no_panel(notebook):
    over = watch("warm", 100, hold=()).replace("panel = ", "handle.wait(60)\npanel = ")
    book = notebook(over, REPORT)
    book.run(0)
    assert mimes(book, 0) == CARD
    assert report(book, 1)["frames"] == 0


def test_a_background_run_goes_on_after_its_cell_and_in_a_second_view(notebook, page):
    book = notebook(watch("long", background=True), REPORT, "handle.cancel(); handle.wait(60)")
    book.run(0)
    panel = book.panel(0)
    expect(panel).to_have_attribute("data-status", "decoding")
    page.evaluate("() => jupyterapp.commands.execute('notebook:create-output-view')")
    second = page.locator(".jp-LinkedOutputView [data-testid=tfm-panel]")
    expect(second).to_have_attribute("data-status", "decoding")
    first = panel.get_by_test_id("tfm-text-0").text_content()
    page.wait_for_function(
        "n => document.querySelector('.jp-LinkedOutputView .tfm-text').textContent.length > n", arg=len(first)
    )
    assert second.get_by_test_id("tfm-text-0").text_content().startswith(first)
    book.open()
    book.run(2)
    expect(panel).to_have_count(0)
    assert mimes(book, 0) == CARD
    page.evaluate(
        """() => [...jupyterapp.shell.widgets('main')].filter(tab => tab.node.querySelector('.jp-LinkedOutputView'))
                    .forEach(tab => tab.dispose())"""
    )


@pytest.mark.parametrize("background", [False, True])
def test_a_page_reloaded_in_mid_run_ends_with_the_card(notebook, page, background):
    book = notebook(watch("long", 1, background), REPORT)
    book.run(0, wait=background)
    panel = book.panel(0)
    expect(panel).to_have_attribute("data-status", "decoding")
    book.save()
    assert any("widget-view" in mime for mime in mimes(book, 0)[0])
    book.reload(busy=not background)
    if background:
        expect(panel).to_have_attribute("data-status", "decoding")
        n = int(panel.get_attribute("data-tokens"))
        page.wait_for_function("n => +document.querySelector('.tfm').dataset.tokens > n", arg=n)
    book.go("decoding")
    until(lambda: mimes(book, 0) == CARD)
    expect(book.cell(0)).to_contain_text("more tokens not shown")
    assert report_of_an_end(book, 1)["status"] == "done"
    saved = book.save()
    assert (
        sorted(saved["cells"][0]["outputs"][0]["data"]) == ["text/html", "text/plain"]
        and "widgets" not in saved["metadata"]
    )


REPLAY = """import scripted
from tfmagic.views import live
run, events = scripted.scenario({name!r})
for wait, event in events:
    run.apply(event)
live.replay(run)
"""
KEPT = "print(len(live._open), len(live._kept))"


def test_a_finished_run_is_stepped_through_and_saved_as_its_card(notebook, page):
    book = notebook(REPLAY.format(name="long"), KEPT)
    book.run(0)
    panel, strip = book.panel(0), book.panel(0).get_by_test_id("tfm-rounds-0")
    expect(panel).to_have_attribute("data-status", "done")
    n = int(strip.get_attribute("aria-valuemax"))
    assert n > 256, "more rounds than the panel holds from the start"
    pinned = panel.locator(".tfm-round")
    expect(pinned).to_contain_text(f"Round 1 of {n}")
    expect(pinned.locator("g.root")).to_have_count(1)  # the kernel has answered
    strip.focus()
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    expect(pinned).to_contain_text("Round 4 of")
    panel.evaluate("el => el.scrollIntoView()")
    picture(page, "panel_tree.png")
    saved = book.save()["cells"][0]["outputs"]
    assert [sorted(output["data"]) for output in saved] == CARD and "Round" in "".join(saved[0]["data"]["text/html"])
    assert "widgets" not in json.loads(book.path.read_text())["metadata"]
    expect(pinned).to_contain_text("Round 4 of")  # the panel stays on the page
    book.run(1)
    assert book.text(1).split() == ["0", "1"]
    page.evaluate("() => { jupyterapp.shell.currentWidget.content.widgets[0].model.clearExecution() }")
    expect(panel).to_have_count(0)
    until(lambda: book.run(1) or book.text(1).split() == ["0", "0"])  # the page says that the view is gone


def test_a_tree_can_be_read_in_the_dark(notebook, page):
    book = notebook(REPLAY.format(name="two"))
    page.evaluate("() => jupyterapp.commands.execute('apputils:change-theme', {theme: 'JupyterLab Dark'})")
    try:
        page.wait_for_function("() => document.body.dataset.jpThemeLight === 'false'")
        book.run(0)
        panel = book.panel(0)
        strip = panel.get_by_test_id("tfm-rounds-1")
        strip.focus()
        page.keyboard.press("Home")
        peek = panel.locator(".tfm-peek")
        expect(peek).to_be_visible()
        page.keyboard.press("Enter")
        expect(peek).to_be_hidden()
        expect(panel.locator(".tfm-round").nth(1).locator("g.root")).to_have_count(1)
        panel.evaluate("el => el.scrollIntoView()")
        picture(page, "panel_tree_dark.png")
    finally:
        page.evaluate("() => jupyterapp.commands.execute('apputils:change-theme', {theme: 'JupyterLab Light'})")


def test_the_page_asked_for_nothing_outside_this_machine_and_had_no_error(notebook, asked, complaints):
    """Of all pages so far: this test stands last."""
    book = notebook(watch("warm", hold=()))
    book.run(0)
    assert len(asked) > 20
    assert {urlsplit(address).hostname for address in asked} <= {"127.0.0.1", None, ""}
    ours = [words for words in complaints if re.search("tfm|anywidget|blob:|widget", words)]
    assert ours == [], "JupyterLab itself complains when kernels go; nobody else may"
