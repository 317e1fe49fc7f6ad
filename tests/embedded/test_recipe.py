"""The recipe: seeded data, right answers, template and ids, tokenizer, painter, delta rule."""

import random
import unicodedata

import jinja2.sandbox
import numpy as np
import pytest

from tfmagic.engine.embedded import conversation, questions, scenes, talk, tasks, words
from tfmagic.engine.embedded.tokenizer import ID, MODEL, SPECIALS, Encoder

CORPUS = {
    "words": [
        "run",
        "take",
        "make",
        "river",
        "letter",
        "stone",
        "quickly",
        "bright",
        "under",
        "seven",
        "morning",
        "paper",
    ],
    "held": ["quartz", "lantern", "fjord"],
    "prose": ["The whale rose slowly beside the ship.", "We shall keep the roads open this year."],
    "chat": ["how was your day?", "I like tea", "thanks a lot", "hey there"],
}


@pytest.fixture(scope="module")
def encoder():
    return Encoder()


@pytest.fixture()
def talker(encoder):
    return conversation.Talker(encoder, words.Words(CORPUS, encoder.pieces()))


def test_same_seed_same_batch(talker):
    layout = conversation.Layout(4, 320)
    batches = []
    for _ in range(2):
        buffer = bytearray(layout.offsets()[1])
        conversation.fill(layout.views(memoryview(buffer)), layout, talker, random.Random(5))
        batches.append(bytes(buffer))
    assert batches[0] == batches[1]


def render(row, encoder):
    """The row's turns through the shipped template and the tokenizer, pictures expanded. -> ids"""
    text = encoder.tokenizer.decode(row.ids, skip_special_tokens=False)
    messages = []
    for turn in text.split("<|im_start|>")[1:]:
        role, content = turn.split("\n", 1)
        content = content.rpartition("<|im_end|>")[0]
        parts = []
        for piece in content.split("<|vision_start|>"):
            if piece.startswith("<|image_pad|>"):
                _pads, piece = piece.split("<|vision_end|>")
                parts.append({"type": "image"})
            parts.append({"type": "text", "text": piece})
        messages.append({"role": role, "content": parts if len(parts) > 1 else content})
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    shown = environment.from_string((MODEL / "chat_template.jinja").read_text()).render(messages=messages)
    ids, sizes = [], iter(scene.tokens for scene in row.scenes)
    for i in encoder.tokenizer.encode(shown).ids:
        ids += [i] * next(sizes) if i == ID["<|image_pad|>"] else [i]
    return ids


def test_training_ids_are_what_template_and_tokenizer_render(talker, encoder):
    draw = random.Random(8)
    for _ in range(60):
        row = talker.row(draw, 320)
        ids = render(row, encoder)
        assert ids[: len(row.ids)] == row.ids  # the last newline may be cut off by the row's end


def test_targets_are_answers_with_their_end(talker, encoder):
    row = talker.row(random.Random(3), 320)
    for kind, start, end in row.spans:
        assert 0 < kind < len(conversation.KINDS)
        assert row.ids[end - 1] == ID["<|im_end|>"]
        assert encoder.tokenizer.decode(row.ids[start - 4 : start]).endswith("assistant\n")


@pytest.mark.parametrize(
    "text",
    [
        "Hello, world!",
        "naïve café — 12,5 €",
        "日本語のテスト",
        "emoji 🦊👩‍👩‍👧 end",
        "tabs\tand\r\nlines\n\n",
        "a" * 300,
        "ﬁ ligature Å",
        "\u0301combining",
        "x_y(z)[0] = {1: '2'}",
    ],
)
def test_tokenizer_round_trip(encoder, text):
    ids = encoder.encode(text)
    assert ids == encoder.tokenizer.encode(text).ids
    assert encoder.tokenizer.decode(ids) == unicodedata.normalize("NFC", text)


def test_tokenizer_rows(encoder):
    assert encoder.tokenizer.get_vocab_size() == 4096
    assert [encoder.tokenizer.token_to_id(text) for text in SPECIALS] == list(range(4096 - len(SPECIALS), 4096))


def seen(scene, trait):
    return sum(questions.matches(shape, trait) for shape in scene.shapes)


def test_counts_and_relations_agree_with_the_scene():
    """Answers parsed again and checked against the objects, not against the code that wrote them."""
    draw, checked = random.Random(2), {"count": 0, "relation": 0, "beside": 0, "exists": 0}
    while min(checked.values()) < 60:
        scene = scenes.random_scene(draw)
        made = draw.choice((questions.count, questions.relation, questions.beside, questions.exists))(
            draw, scene.shapes, ""
        )
        if not made:
            continue
        _, reply, kind = made
        checked[kind] += 1
        if kind == "count":
            number, name = reply.removeprefix("There is ").removeprefix("There are ").rstrip(".").split(" ", 1)
            assert (0 if number == "no" else int(number)) == len([s for s in scene.shapes if fits(s, name)])
        elif kind == "exists":
            name = reply.rstrip(".").split(" there is ")[1].removeprefix("a ").removeprefix("an ").removeprefix("no ")
            assert reply.startswith("Yes") == any(fits(s, name) for s in scene.shapes)
        elif kind == "relation":
            a, way, b = split_way(reply.split(", the ", 1)[1].rstrip("."))
            assert is_side(only(scene, a), way, only(scene, b))
        elif not reply.startswith("There is no"):
            found, way, b = split_way(reply.rstrip("."))
            base = only(scene, b)
            there = [s for s in scene.shapes if s is not base and is_side(s, way, base)]
            listed = [] if found == "Nothing" else found.replace(" and ", ", ").split(", ")
            assert [questions.full(s) for s in sorted(there, key=lambda s: s.x)] == [
                x.lower().removeprefix("an ").removeprefix("a ") for x in listed
            ]


def fits(shape, name):
    wanted = name.split()
    have = {
        shape.kind,
        shape.kind + "s",
        shape.kind + "es",
        shape.colour,
        "big" if shape.big else "small",
        "shape",
        "shapes",
    }
    return all(word in have for word in wanted)


def only(scene, name):
    found = [s for s in scene.shapes if fits(s, name)]
    assert len(found) == 1
    return found[0]


def split_way(text):
    for way in ("left of", "right of", "above", "below"):
        for verb in (" is ", " are "):
            if f"{verb}{way} the " in text:
                a, b = text.split(f"{verb}{way} the ")
                return a, way, b
    raise AssertionError(text)


def is_side(a, way, b):
    return {"left of": a.x < b.x, "right of": a.x > b.x, "above": a.y < b.y, "below": a.y > b.y}[way]


def test_edits_and_sums_are_right():
    draw, source = random.Random(4), words.Words(CORPUS)
    for _ in range(300):
        question, reply, _ = tasks.sums(draw, source)
        if reply != tasks.TOO_HARD:
            left, right = reply.rstrip(".").split(" = ")
            assert eval(left) == int(right)
    for _ in range(100):
        question, reply, _ = tasks.copy(draw, source)
        assert reply.split(" ")[0] in question


def test_small_talk_is_answered_by_kind():
    assert talk.reply("Hello!") == talk.HELLO
    assert talk.reply("thanks so much") == talk.WELCOME
    assert talk.reply("why is the sky blue?") == talk.UNKNOWN
    assert talk.reply("I had soup today") == talk.LISTENING


def test_painter_puts_the_colour_where_the_shape_is():
    torch = pytest.importorskip("torch")
    from tfmagic.engine.embedded.painter import paint

    draw, hits, total = random.Random(1), 0, 0
    for _ in range(12):
        scene = scenes.random_scene(draw, 36)
        row, column = (torch.from_numpy(a) for a in conversation.patch_order(scene.columns, scene.rows))
        pixels = paint(
            torch.from_numpy(scene.shape_numbers)[None],
            torch.from_numpy(scene.ground_numbers)[None],
            torch.zeros(len(row)),
            row,
            column,
        )
        assert pixels.shape == (4 * scene.tokens, 768) and pixels.isfinite().all() and pixels.abs().max() <= 1
        grid = (
            pixels.view(scene.rows, scene.columns, 2, 2, 3, 16, 16)
            .permute(0, 2, 5, 1, 3, 6, 4)
            .reshape(scene.rows * 32, scene.columns * 32, 3)
        )
        for shape, numbers in zip(scene.shapes, scene.shape_numbers):
            if numbers[12] == 0:  # no hatching
                at = grid[int(shape.y * scene.rows * 32), int(shape.x * scene.columns * 32)]
                hits += bool((at / 2 + 0.5 - torch.from_numpy(numbers[7:10])).abs().max() < 0.25)
                total += 1
    assert hits >= 0.9 * total > 10


def test_delta_twin_is_the_recurrence():
    torch = pytest.importorskip("torch")
    from tfmagic.engine.embedded.delta import delta_twin

    torch.manual_seed(0)

    def unit(a):
        return a / a.norm(dim=-1, keepdim=True)

    q, k, v = unit(torch.randn(2, 100, 2, 16)), unit(torch.randn(2, 100, 2, 16)), torch.randn(2, 100, 4, 16)
    g, beta = -torch.rand(2, 100, 4), torch.rand(2, 100, 4)
    state, rows = torch.zeros(2, 4, 16, 16), []
    for t in range(100):
        key, query = (a[:, t].repeat_interleave(2, 1) for a in (k, q))
        state = state * g[:, t].exp()[..., None, None]
        change = (v[:, t] - torch.einsum("bhkv,bhk->bhv", state, key)) * beta[:, t][..., None]
        state = state + key[..., None] * change[..., None, :]
        rows.append(torch.einsum("bhkv,bhk->bhv", state, query))
    torch.testing.assert_close(delta_twin(q, k, v, g, beta), torch.stack(rows, 1), rtol=1e-4, atol=1e-5)


def test_positions_span_a_picture_like_the_published_rule():
    scene = scenes.Scene(3, 2, [], None, None)
    row = conversation.Row([0] * 12, [], [scene], [2])
    got = conversation.positions(row, 12)
    assert got[:, :2].tolist() == [[0, 1]] * 3
    assert got[:, 2:8].tolist() == [[2] * 6, [2, 2, 2, 3, 3, 3], [2, 3, 4, 2, 3, 4]]
    assert got[:, 8:].tolist() == [[5, 6, 7, 8]] * 3
    assert got.dtype == np.int16
