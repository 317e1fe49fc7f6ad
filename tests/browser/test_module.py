"""The module alone in Chromium, with a model of ours: frames lost, late or out of order, silence, a hidden page."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import scripted

from tests.patience import LONG, until
from tfmagic.views import frames, live

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
    page.set_default_timeout(1e3 * LONG)
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

    def hears() -> bool:  # where the page stands still for long behind a word, the kernel is silent again
        tell(alone, [{"seq": told.frames[11]["seq"], "elapsed": 700.0}])
        shown(alone)
        return alone.locator(".tfm-says").is_hidden()

    until(hears)


def test_stop_without_a_kernel_to_reach_is_a_widget_message(alone, told):
    tell(alone, told.frames[:12])
    alone.get_by_test_id("tfm-stop").click()
    assert alone.evaluate("() => sent") == [{"op": "stop", "panel": told.first["head"]["panel"]}]


def bar(page, k: int) -> tuple[float, float]:
    """Where round k's bar is, for a strip that holds all rounds."""
    box = page.get_by_test_id("tfm-rounds-0").bounding_box()
    return box["x"] + 8 * k + 3, box["y"] + 20


def test_a_round_shows_its_tree_when_it_is_pointed_at(alone, told):
    tell(alone, told.frames)
    peek, rounds = alone.locator(".tfm-peek"), told.record.streams[0].rounds
    assert not peek.is_visible()
    alone.mouse.move(*bar(alone, 4))
    peek.wait_for()
    assert peek.locator("b").inner_text() == f"Round 5 of {len(rounds)}"
    boxes = peek.locator("g:not(.root):not(.own)")
    assert boxes.count() == rounds[4].drafted
    assert peek.locator("g.in, g.copied").count() == rounds[4].accepted
    alone.mouse.move(5, 5)
    peek.wait_for(state="hidden")


def test_rounds_are_stepped_through_by_keyboard(alone, told):
    tell(alone, told.frames)
    shown(alone)
    rounds, strip, pinned = told.record.streams[0].rounds, alone.get_by_test_id("tfm-rounds-0"), ".tfm-round"
    assert strip.get_attribute("role") == "slider" and strip.get_attribute("aria-valuemax") == str(len(rounds))
    strip.focus()
    steps = [("ArrowLeft", -2), ("ArrowLeft", -3), ("ArrowRight", -2), ("Home", 0), ("ArrowLeft", 0), ("End", -1)]
    for key, at in steps:
        alone.keyboard.press(key)
        assert strip.get_attribute("aria-valuenow") == str(range(len(rounds))[at] + 1), key
    assert alone.locator(pinned).is_hidden() and alone.locator(".tfm-peek").is_visible()
    tree = next(k for k, verified in enumerate(rounds) if verified.draft_source == "tree" and verified.accepted > 1)
    alone.keyboard.press("Home")
    for _ in range(tree):
        alone.keyboard.press("ArrowRight")
    said, verified = strip.get_attribute("aria-valuetext"), rounds[tree]
    for words in (
        f"round {tree + 1} of {len(rounds)}; tree, {verified.drafted} rows drafted, {verified.accepted} accepted",
        f"expected {verified.expected:.1f} tokens, gave {verified.committed}",
        f"draft {verified.draft_ms:.1f} · verify {verified.verify_ms:.1f} · commit {verified.commit_ms:.1f} ms",
        "".join(node.piece for node in verified.nodes if node.accepted),
    ):
        assert words in said
    alone.keyboard.press("Enter")
    pinned = alone.locator(pinned)
    assert pinned.is_visible() and alone.locator(".tfm-peek").is_hidden()
    assert pinned.locator("g.in").count() == verified.accepted and pinned.locator("g.root").count() == 1
    later = pinned.get_by_role("button", name="later round")
    later.click()
    later.click()
    assert strip.get_attribute("aria-valuenow") == str(tree + 3)
    assert later.evaluate("el => el === document.activeElement"), "the button keeps the focus"
    strip.focus()
    alone.keyboard.press("Escape")
    assert pinned.is_hidden()


def test_a_tree_opens_and_closes_by_click_and_stays_while_the_run_goes_on(alone, told):
    tell(alone, told.frames[:14])
    shown(alone)
    alone.mouse.click(*bar(alone, 1))
    pinned = alone.locator(".tfm-round")
    assert "Round 2 of" in pinned.inner_text()
    tell(alone, told.frames[14:])
    shown(alone)
    assert f"Round 2 of {len(told.record.streams[0].rounds)}" in pinned.inner_text()
    alone.mouse.click(*bar(alone, 1))
    assert pinned.is_hidden()


def test_rounds_that_the_page_lacks_are_asked_for_once(alone, told):
    last = json.loads(json.dumps(told.last))
    trees = last["streams"]["0"]["trees"]
    last["streams"]["0"]["trees"] = trees[-2:]
    alone.evaluate("state => snapshot(state)", last)
    shown(alone)
    alone.mouse.click(*bar(alone, 3))
    alone.mouse.click(*bar(alone, 4))
    pinned = alone.locator(".tfm-round")
    assert "asked for" in pinned.inner_text()
    asked = [message for message in alone.evaluate("() => sent") if message["op"] == "trees"]
    assert asked and {(message["stream"], message["panel"]) for message in asked} == {(0, last["head"]["panel"])}
    assert len({message["round"] // 8 for message in asked}) == len(asked), "a place is asked for once"
    answer = {"asked": {"stream": 0, **frames.rounds(told.record.streams[0], 0, 8)}}
    alone.evaluate("answer => tell('msg:custom', answer)", json.loads(json.dumps(answer)))
    shown(alone)
    assert pinned.locator("g.root").count() == 1


def test_a_snapshot_forgets_no_round(alone, told):
    tell(alone, told.frames[:-1])
    last = json.loads(json.dumps(told.last))
    last["streams"]["0"]["trees"] = last["streams"]["0"]["trees"][-1:]
    alone.evaluate("state => snapshot(state)", last)
    shown(alone)
    alone.mouse.click(*bar(alone, 2))
    assert alone.locator(".tfm-round").locator("g.root").count() == 1
    assert not [message for message in alone.evaluate("() => sent") if message["op"] == "trees"]


def test_the_tile_tells_whether_drafting_paid(alone, told):
    tell(alone, told.frames)
    shown(alone)
    drafting = told.record.drafting
    said = alone.get_by_role("group", name="Drafts accepted").inner_text().replace("\xa0", " ")
    assert f"×{drafting['speedup']:.1f} faster (expected ×{drafting['expected_speedup']:.1f})" in said
    assert f"{drafting['cut']} rows cut" in said
    for source, of in drafting["by_source"].items():
        if of["drafted"]:
            assert f"{'copies' if source == 'copy' else source} {100 * of['acceptance']:.0f} %" in said


def test_a_speedup_that_is_not_known_is_a_dash(alone, told):
    tell(alone, told.frames)
    cases = (([0.9, None], "×0.90, slower (expected –)"), ([None, 3.04], "– speed-up (expected ×3.0)"))
    for seq, (speedup, words) in enumerate(cases, told.frames[-1]["seq"] + 1):
        tell(alone, [{"seq": seq, "elapsed": 9.0, "head": {"speedup": speedup}, "streams": {}}])
        shown(alone)
        assert words in alone.get_by_role("group", name="Drafts accepted").inner_text()


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
    before = [frame["streams"]["0"] for frame in told.frames[:12] if "bars" in frame["streams"].get("0", {})]
    k = before[-1]["rounds"]
    tree = {"root": evil, "pieces": [evil], "parents": [0], "chances": [50], "taken": [], "own": evil, "ms": [1, 1, 1]}
    news = {"segments": [["d", evil], ["x", evil]], "rounds": k + 1, "bars": [[1, 0, evil, 0, 1]], "trees": [tree]}
    tell(alone, [*told.frames[:12], {**told.frames[12], "head": head, "streams": {"0": news}}])
    shown(alone)
    alone.mouse.click(*bar(alone, k))
    assert alone.locator(".tfm-round").locator("g").count() == 3
    assert alone.locator("main img").count() == 0
    assert alone.evaluate("() => document.body.dataset.bad ?? ''") == ""


def test_the_card_takes_the_place_where_no_notebook_can_be_reached(alone, told):
    tell(alone, told.frames)
    alone.evaluate(
        "() => { values.card = {html: '<p id=card>card</p>', text: 'card', widget: 'w'}; tell('change:card') }"
    )
    alone.wait_for_selector("#card")
    assert alone.locator(".tfm").count() == 0
    alone.evaluate("() => cleanup()")
    assert alone.evaluate("() => sent.at(-1).op") == "gone"


def test_little_motion(browser, alone):
    alone.emulate_media(reduced_motion="reduce")
    assert (
        alone.evaluate("() => getComputedStyle(document.querySelector('.tfm-strip > .of-done')).transitionDuration")
        == "0s"
    )
