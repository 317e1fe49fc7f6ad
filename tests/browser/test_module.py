"""The module alone in Chromium, with a model of ours: frames lost, late or out of order, silence, a hidden page."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import scripted

from tfmagic.views import live

PAGE = """<!doctype html><style>%s</style><main></main><script type="module">
const {default: make} = await import(URL.createObjectURL(new Blob([%s], {type: "text/javascript"})));
window.sent = [];
window.listeners = {};
window.values = {state: %s, card: {}};
window.model = {get: k => values[k], on: (e, f) => (listeners[e] ??= []).push(f), off() {}, send: m => sent.push(m)};
window.tell = (event, value) => { for (const f of listeners[event] ?? []) f(value) };
window.snapshot = state => { values.state = state; tell("change:state") };
window.widget = make();
await widget.initialize({model});
window.cleanup = await widget.render({model, el: document.querySelector("main")});
document.body.dataset.ready = "true";
</script>"""


@pytest.fixture
def told():
    """A scenario's record, its first snapshot, all its frames, and its last snapshot."""
    record, script = scripted.scenario("warm")
    panel = live.Panel(SimpleNamespace(record=record, version=0))
    panel._frame()
    first, frames = panel._snapshot(), []
    for _, event in script:
        record.apply(event)
        frames.append(panel._frame())
    return SimpleNamespace(record=record, first=first, frames=json.loads(json.dumps(frames)), last=panel._snapshot())


@pytest.fixture
def alone(browser, told):
    """A page with the panel of the scenario's beginning."""
    page = browser.new_page(viewport={"width": 900, "height": 700})
    style = live.Path(live.__file__).with_name("live.css").read_text()
    module = live.Path(live.__file__).with_name("live.js").read_text()
    page.set_content(PAGE % (style, scripted.literal(module), scripted.literal(told.first)))
    page.wait_for_selector("body[data-ready]")
    yield page
    page.close()


def shown(page) -> str:
    """The reply's text as it is drawn, without its rejected drafts."""
    page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    return page.evaluate(
        """() => { const text = document.querySelector('.tfm-text').cloneNode(true);
                   text.querySelectorAll('del').forEach(el => el.remove()); return text.textContent }"""
    )


def tell(page, frames) -> None:
    page.evaluate("frames => frames.forEach(frame => tell('msg:custom', frame))", frames)


def test_frames_in_order(alone, told):
    tell(alone, told.frames)
    assert shown(alone) == told.record.text
    assert alone.locator(".tfm").get_attribute("data-status") == "done"


def test_frames_twice_and_out_of_order(alone, told):
    shuffled = [*told.frames[8:], *told.frames[:4], *told.frames[2:8], *told.frames[::-1]]
    tell(alone, shuffled)
    assert shown(alone) == told.record.text


def test_a_lost_frame_is_made_good_by_the_next_snapshot(alone, told):
    tell(alone, told.frames[:10])
    before = shown(alone)
    tell(alone, told.frames[11:20])
    assert shown(alone) == before, "nothing is drawn over a gap"
    alone.evaluate("state => snapshot(state)", told.last)
    assert shown(alone) == told.record.text
    tell(alone, told.frames[20:])
    assert shown(alone) == told.record.text, "a snapshot's text is not told twice"


def test_text_that_is_drawn_stays_where_it_is(alone, told):
    """A frame adds nodes behind those that are there, and touches none of them."""
    tell(alone, told.frames[:10])
    shown(alone)
    alone.evaluate("() => { window.nodes = [...document.querySelector('.tfm-text').childNodes] }")
    tell(alone, told.frames[10:])
    shown(alone)
    now = "[...document.querySelector('.tfm-text').childNodes]"
    assert alone.evaluate(
        f"() => nodes.length > 3 && nodes.every((node, i) => {now}[i] === node) && {now}.length > nodes.length"
    )


def test_a_hidden_page_draws_nothing_and_catches_up(alone, told):
    alone.evaluate(
        "() => { window.away = true; Object.defineProperty(document, 'hidden', {get: () => away, configurable: true}) }"
    )
    tell(alone, told.frames)
    assert shown(alone) == ""
    alone.evaluate("() => { away = false; document.dispatchEvent(new Event('visibilitychange')) }")
    assert shown(alone) == told.record.text


def test_a_silent_kernel_is_told(alone, told):
    tell(alone, told.frames[:12])
    alone.evaluate("() => { const real = performance.now.bind(performance); performance.now = () => real() + 6000 }")
    alone.wait_for_selector(".tfm-says.bad:visible")
    assert "No word from the kernel" in alone.locator(".tfm-says").inner_text()
    clock = alone.locator(".tfm-head .tfm-dim").inner_text()
    alone.wait_for_timeout(400)
    assert alone.locator(".tfm-head .tfm-dim").inner_text() == clock, "the clock stands"
    tell(alone, [{"seq": told.frames[11]["seq"], "elapsed": 700.0}])
    alone.wait_for_selector(".tfm-says", state="hidden")


def test_stop_without_a_kernel_to_reach_is_a_widget_message(alone, told):
    tell(alone, told.frames[:12])
    alone.get_by_test_id("tfm-stop").click()
    assert alone.evaluate("() => sent") == [{"op": "stop", "panel": told.first["head"]["panel"]}]


def test_words_of_a_run_stay_words(alone, told):
    """Nothing that a run says is markup."""
    evil = "<img src=x onerror=\"document.body.dataset.bad='1'\">"
    head = {
        "model": evil,
        "chat": evil,
        "error": evil,
        "pictures": [[evil, 1, 1, 0, 10, True]],
        "drafts": {evil: [1, 2, 1]},
    }
    tell(
        alone,
        [
            *told.frames[:12],
            {**told.frames[12], "head": head, "streams": {"0": {"segments": [["d", evil], ["x", evil]]}}},
        ],
    )
    shown(alone)
    assert alone.locator("main img").count() == 0
    assert alone.evaluate("() => document.body.dataset.bad ?? ''") == ""


def test_the_card_takes_the_place_where_no_notebook_can_be_reached(alone, told):
    tell(alone, told.frames)
    alone.evaluate(
        "() => { values.card = {html: '<p id=card>card</p>', text: 'card', widget: 'w'}; tell('change:card') }"
    )
    alone.wait_for_selector("#card", timeout=4000)
    assert alone.locator(".tfm").count() == 0
    alone.evaluate("() => cleanup()")
    assert alone.evaluate("() => sent.at(-1).op") == "gone"


def test_little_motion(browser, alone):
    alone.emulate_media(reduced_motion="reduce")
    assert (
        alone.evaluate("() => getComputedStyle(document.querySelector('.tfm-strip > .of-done')).transitionDuration")
        == "0s"
    )
