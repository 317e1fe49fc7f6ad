"""The model that ships: its files, its sizes, and that it does what its card says."""

import gzip
import json
import math

import pytest
from PIL import Image

from tfmagic.engine.embedded import MODEL
from tfmagic.engine.embedded.draw import STYLES, draw
from tfmagic.engine.embedded.tokenizer import ID

FILES = (
    "config.json", "generation_config.json", "preprocessor_config.json", "tokenizer.json", "tokenizer_config.json",
    "chat_template.jinja", "README.md", "model.safetensors.index.json",
)  # fmt: skip
HELD = [
    "quiet",
    "stock",
    "power",
    "brush",
    "contact",
    "level",
    "quartz",
    "lantern",
    "fjord",
    "magnet",
    "orchard",
    "plaster",
    "walnut",
    "harness",
    "thimble",
    "gravel",
    "bracket",
    "cobalt",
    "tundra",
    "saffron",
]
RED_CIRCLES = [("circle", "red", 0.2, 0.3), ("square", "blue", 0.5, 0.6), ("circle", "red", 0.8, 0.3, "small")]


def header(path):
    """The tensor table of a safetensors file."""
    with open(path, "rb") as file:
        return json.loads(file.read(int.from_bytes(file.read(8), "little")))


def test_every_file_is_there():
    assert [name for name in FILES if not (MODEL / name).is_file()] == []


def test_weights_are_bf16_small_and_complete():
    shards = sorted(MODEL.glob("*.safetensors"))
    assert sum(path.stat().st_size for path in shards) < 40_000_000
    tensors = {k: v for path in shards for k, v in header(path).items() if k != "__metadata__"}
    assert {t["dtype"] for t in tensors.values()} == {"BF16"}
    assert set(json.loads((MODEL / "model.safetensors.index.json").read_text())["weight_map"]) == set(tensors)
    sizes = {name: math.prod(t["shape"]) for name, t in tensors.items()}
    tower = sum(n for name, n in sizes.items() if "visual" in name)
    assert 1e6 < tower < 2e6
    assert 8e6 < sum(sizes.values()) - tower < 12e6


def test_config_is_what_the_recipe_writes():
    from tfmagic.engine.embedded.export import small_files

    for name, content in small_files().items():
        text = (MODEL / name).read_text()
        assert (text if isinstance(content, str) else json.loads(text)) == content, name


def test_special_ids_agree():
    config = json.loads((MODEL / "config.json").read_text())
    assert config["model_type"] == "qwen3_5"
    assert config["image_token_id"] == ID["<|image_pad|>"]
    assert config["text_config"]["vocab_size"] == 4096
    generation = json.loads((MODEL / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [ID["<|im_end|>"], ID["<|endoftext|>"]]


def test_card_has_scores_and_limits():
    card = (MODEL / "README.md").read_text()
    for word in ("count", "relation", "edit", "cannot", "evaluate", "seed", "licence"):
        assert word in card.lower()
    assert "stand-in" not in card.lower()


@pytest.mark.parametrize("style", STYLES)
def test_drawer(style):
    picture = draw(RED_CIRCLES, (200, 130), style)
    assert picture.size == (200, 130) and picture.mode == "RGB"
    assert picture.tobytes() == draw(RED_CIRCLES, (200, 130), style).tobytes()
    with pytest.raises(ValueError, match="no style"):
        draw(RED_CIRCLES, style="baroque")


def test_answers(net_and_talker):
    from tfmagic.engine.embedded.evaluate import answer

    net, talker = net_and_talker
    picture = draw(RED_CIRCLES, (256, 192))
    question = "How many red circles are there, and what is left of the square?"
    both = "There are 2 red circles. A big red circle is left of the square."
    assert answer(net, talker, question, [picture]) == both
    assert answer(net, talker, "Replace Alice with Bob: Alice met Carol.") == "Bob met Carol."
    assert answer(net, talker, "What is the capital of Spain?").startswith("I do not know that.")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "floor"), [("words", 85), ("smooth", 94), ("photo", 94), ("hatch", 94), ("ink", 94)])
def test_held_out_floor(net_and_talker, small_corpus, name, floor):
    """A small sample of the card's evaluation: exact answers, in per cent."""
    from tfmagic.engine.embedded.evaluate import score

    result = score(net_and_talker[0], small_corpus, name, rows=16, batch=4)
    share, number = result["ALL"]
    assert number >= 25
    assert share >= floor, result


@pytest.mark.slow
def test_transformers_gives_the_same_greedy_text(net_and_talker):
    transformers = pytest.importorskip("transformers", minversion="5.0")
    torch = pytest.importorskip("torch")
    from tfmagic.engine.embedded.evaluate import answer

    net, talker = net_and_talker
    model = transformers.Qwen3_5ForConditionalGeneration.from_pretrained(MODEL, dtype=torch.float32).eval()
    picture = draw(RED_CIRCLES, (256, 192))
    for question, images in (
        ("Tell me a story about Mia and a lamp.", []),
        ("What is 48 + 37?", []),
        ("List: milk, eggs, flour\nRemove eggs from the list.", []),
        ("Describe the picture.", [picture]),
        ("Which picture has more circles?", [picture, Image.new("RGB", (100, 300), (90, 120, 90))]),
    ):
        assert generate(model, talker, question, images) == answer(net, talker, question, images)


def generate(model, talker, question, images):
    """Greedy text by transformers' own generate, from the shipped template's form."""
    import torch

    from tfmagic.engine.embedded.evaluate import patches, token_grid

    grids = [token_grid(*image.size) for image in images]
    pads = "".join(f"<|vision_start|>{'<|image_pad|>' * (c * r)}<|vision_end|>" for c, r in grids)
    text = f"<|im_start|>user\n{pads}{question}<|im_end|>\n<|im_start|>assistant\n"
    ids = torch.tensor([talker.encoder.tokenizer.encode(text).ids])
    extra = {}
    if images:
        pixels = torch.cat([patches(image, *grid) for image, grid in zip(images, grids)])
        pixels = pixels.view(-1, 3, 1, 256).expand(-1, 3, 2, 256).reshape(len(pixels), -1)
        extra = {
            "pixel_values": pixels,
            "image_grid_thw": torch.tensor([[1, 2 * r, 2 * c] for c, r in grids]),
            "mm_token_type_ids": (ids == ID["<|image_pad|>"]).int(),
        }
    with torch.no_grad():
        out = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=90, do_sample=False,
            temperature=None, top_p=None, top_k=None, **extra,
        )  # fmt: skip
    return talker.encoder.tokenizer.decode(out[0, ids.shape[1] :].tolist(), skip_special_tokens=True)


@pytest.fixture(scope="module")
def small_corpus(tmp_path_factory):
    """A corpus of a few words and sentences, enough to ask questions with."""
    path = tmp_path_factory.mktemp("corpus") / "corpus.json.gz"
    words = [
        "river",
        "letter",
        "stone",
        "quickly",
        "bright",
        "under",
        "seven",
        "morning",
        "paper",
        "garden",
        "yellow",
        "window",
        "travel",
    ]
    corpus = {
        "words": words, "held": HELD,
        "prose": ["The whale rose slowly beside the ship.", "We shall keep the roads open this year."],
        "chat": ["how was your day?", "I like tea", "see you soon"],
    }  # fmt: skip
    with gzip.open(path, "wt") as file:
        json.dump(corpus, file)
    return path


@pytest.fixture(scope="module")
def net_and_talker(small_corpus):
    torch = pytest.importorskip("torch")
    from tfmagic.engine.embedded.evaluate import load
    from tfmagic.engine.embedded.feed import make_talker

    torch.set_num_threads(1)
    return load(), make_talker(small_corpus)
