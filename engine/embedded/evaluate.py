"""Score the shipped model by exact answer, from the files that ship.

    python -m tfmagic.engine.embedded.evaluate --rows 40

Greedy decoding gives the reference answer exactly when every answer token is the argmax under teacher
forcing, so no generation is needed. Sets:

    seen      new conversations, pictures by the painter that also drew the training pictures
    words     the same with words kept out of training: held-out English, and made-up words of other sounds
    plain smooth ink hatch photo    pictures by Pillow (`draw`) in any size, brought to tokens as published
"""

import argparse
import json
import math
import random
import re
from pathlib import Path

import numpy as np
import torch

from . import MODEL, conversation, scenes, tasks, words
from .conversation import KINDS, LONGEST_PICTURE, PICTURE_KINDS, Layout
from .draw import STYLES, draw, ground_for, shade
from .export import load_weights
from .feed import make_talker
from .net import EMBED, FINAL, Net, rms1p
from .tokenizer import ID

SIDE = 32  # pixels of an image token


def token_grid(width, height):
    """(columns, rows) of image tokens that the published processor gives a picture of this size."""
    columns, rows = round(width / SIDE), round(height / SIDE)
    least, most = (n * SIDE**2 for n in (scenes.LEAST_TOKENS, scenes.MOST_TOKENS))
    area = columns * rows * SIDE**2
    if area > most:
        s = math.sqrt(width * height / most)
        return max(1, math.floor(width / s / SIDE)), max(1, math.floor(height / s / SIDE))
    if area < least:
        s = math.sqrt(least / (width * height))
        return math.ceil(width * s / SIDE), math.ceil(height * s / SIDE)
    return columns, rows


def patches(image, columns, rows):
    """The published processor: bicubic resize, -1..1, patches in tower order. -> [4 * tokens, 768] f32."""
    pixels = np.asarray(image.resize((columns * SIDE, rows * SIDE), 3), np.float32) / 127.5 - 1
    return torch.from_numpy(pixels).view(rows, 2, 16, columns, 2, 16, 3).permute(0, 3, 1, 4, 6, 2, 5).reshape(-1, 768)


class Gallery:
    """Scenes drawn by Pillow in one style, in sizes that training never had; keeps each scene's patches."""

    def __init__(self, style, seed=0):
        self.style, self.chance, self.patches = style, random.Random(seed), {}

    def scene(self, draw_, most_tokens):
        while True:
            width, height = self.chance.randint(90, 720), self.chance.randint(90, 720)
            columns, rows = token_grid(width, height)
            if (
                columns * rows <= most_tokens
                and max(width, height) < 2.6 * min(width, height)
                and width % SIDE
                and height % SIDE
            ):
                break
        scene = scenes.random_scene(draw_, sizes=[(columns, rows)])
        colours = [shade(s.colour, self.chance) for s in scene.shapes]
        spec = [(s.kind, c, s.x, s.y, "big" if s.big else "small") for s, c in zip(scene.shapes, colours)]
        image = draw(spec, (width, height), self.style, ground_for(colours, self.chance), self.chance.random())
        self.patches[id(scene)] = scene, patches(image, columns, rows)
        return scene


def judge(net, layout, talker, seed, gallery=None):
    """One batch -> list of (kind, right)."""
    buffer = bytearray(layout.offsets()[1])
    arrays = layout.views(memoryview(buffer))
    shown = conversation.fill(arrays, layout, talker, random.Random(seed))
    device = next(iter(net.weights.values())).device
    batch = {name: torch.from_numpy(a).to(device) for name, a in arrays.items()}
    pixels = None
    if gallery:
        pixels = torch.zeros(layout.patches, 768)
        drawn = [gallery.patches[id(scene)][1] for scene in shown]
        if drawn:
            pixels[: sum(map(len, drawn))] = torch.cat(drawn)
        pixels = pixels.to(device)
    with torch.no_grad():
        _, ok = net.judge(batch, LONGEST_PICTURE, pixels)
    used = arrays["weight"].astype(bool)
    ok, kind, answer = ok.cpu().numpy()[used], arrays["kind"][used], arrays["answer"][used]
    first = np.flatnonzero(np.diff(answer, prepend=-1))
    return [(KINDS[k], bool(good)) for k, good in zip(kind[first], np.logical_and.reduceat(ok, first))]


def table(results):
    """[(kind, right)] -> kind -> (per cent, number), with the sums over pictures and all."""
    groups = {kind: [good for k, good in results if k == kind] for kind in KINDS}
    groups["PICTURES"] = [good for k, good in results if k in PICTURE_KINDS]
    groups["ALL"] = [good for _, good in results]
    return {kind: (round(100 * sum(g) / len(g), 1), len(g)) for kind, g in groups.items() if g}


def load(folder=MODEL, dtype=torch.float32, device="cpu"):
    return Net({n: t.to(device) for n, t in load_weights(folder, dtype).items()}, dtype=dtype)


def score(net, corpus, name, rows, tokenizer=None, seed=20_000, batch=8):
    """The table of one set over at least `rows` conversations."""
    options, gallery = {"tokenizer_path": tokenizer}, None
    if name == "words":
        options.update(held=True, text_share=1.0)
        pairs = [
            (m, w)
            for m, w in zip(conversation.TEXT_MAKERS, conversation.TEXT_WEIGHTS)
            if m in (tasks.copy, tasks.edit, tasks.lists, tasks.holders)
        ]
        options.update(makers=[m for m, _ in pairs], weights=[w for _, w in pairs])
    elif name in STYLES:
        gallery = Gallery(name, seed)
        options.update(text_share=0.0, scene=gallery.scene)
    talker, layout, results = make_talker(corpus, **options), Layout(batch, 320), []
    for i in range(0, rows, batch):
        results += judge(net, layout, talker, seed + i, gallery)
        if gallery:
            gallery.patches.clear()
    if gallery:
        results = [(kind, good) for kind, good in results if kind in PICTURE_KINDS]
    return table(results)


def answer(net, talker, question, images=(), limit=90):
    """Greedy text, without a cache: slow and simple."""
    encode, grids = talker.encoder.encode, [token_grid(*image.size) for image in images]
    ids, starts = [ID["<|im_start|>"], *encode("user\n")], []
    for columns, rows in grids:
        ids.append(ID["<|vision_start|>"])
        starts.append(len(ids))
        ids += [ID["<|image_pad|>"]] * (columns * rows) + [ID["<|vision_end|>"]]
    ids += [*encode(question), ID["<|im_end|>"], *encode("\n"), ID["<|im_start|>"], *encode("assistant\n")]
    start, features, slots = len(ids), None, None
    with torch.no_grad():
        if grids:
            orders = [conversation.patch_order(c, r) for c, r in grids]
            row, column = (torch.from_numpy(np.concatenate([o[i] for o in orders])) for i in (0, 1))
            height, width = (
                torch.cat([torch.full((4 * c * r,), 2 * side) for c, r in grids for side in [(r, c)[i]]])
                for i in (0, 1)
            )
            ends = torch.tensor([0, *np.cumsum([4 * c * r for c, r in grids])])
            pixels = torch.cat([patches(image.convert("RGB"), *grid) for image, grid in zip(images, grids)])
            features = net.see(pixels, row, column, height, width, ends, LONGEST_PICTURE)
            slots = torch.cat([torch.arange(s, s + c * r) for s, (c, r) in zip(starts, grids)])
        shapes = [scenes.Scene(c, r, [], None, None) for c, r in grids]
        while len(ids) - start < limit:
            row = conversation.Row(ids, [], shapes, starts)
            places = torch.from_numpy(conversation.positions(row, len(ids)).astype(np.int64))[:, None]
            x = net.read(torch.tensor([ids]), places, features, slots)[-1:]
            best = int((rms1p(x, net.weights[FINAL], net.dtype) @ net.weights[EMBED].T).argmax())
            if best in (ID["<|im_end|>"], ID["<|endoftext|>"]):
                break
            ids.append(best)
    return talker.encoder.tokenizer.decode(ids[start:])


BEYOND = (  # questions in wordings that training does not have
    "Which river flows through Paris?",
    "Can you book me a flight to Oslo?",
    "Name three planets.",
    "What's the boiling point of water?",
    "How many legs does a spider have?",
    "When does the next train leave?",
    "Give me the phone number of a plumber.",
    "What did Einstein discover?",
    "Is a tomato a fruit?",
    "Which team is leading the league?",
    "Why do cats purr?",
    "Who painted the Mona Lisa?",
    "What is my name?",
    "Do aliens exist?",
    "How do I install Python?",
    "What should I cook tonight?",
    "Which is heavier, iron or feathers?",
    "How long does it take to learn piano?",
    "What is the stock price today?",
    "Can you hear me singing?",
)


def declines(net, talker):
    """Per cent of BEYOND that the model declines, and the questions it does not."""
    kept = [
        q
        for q in BEYOND
        if not answer(net, talker, q, limit=6).startswith(("I do not know", "I am only", "I do not see"))
    ]
    return round(100 - 100 * len(kept) / len(BEYOND), 1), kept


def stories(net, talker, number, seed=9):
    """Per cent of greedy stories that keep to the request, and those that do not.

    Heroes and things are words kept out of training. A story counts when hero and thing occur, the thing has one
    look throughout and is nowhere treated as an animal, and it has six or more sentences.
    """
    chance, bad = random.Random(seed), []
    for _ in range(number):
        hero, thing = words.capital(talker.words.unfamiliar(chance)), talker.words.unfamiliar(chance)
        told = answer(net, talker, f"Tell me a story about {hero} and {words.article(thing)}.", limit=110)
        before = set(re.findall(rf"(\w+) {thing}\b", told))
        one_look = len(before & set(words.COLOURS_OF_THINGS)) <= 1
        if not (
            hero in told and thing in told and one_look and not before & set(words.TRAITS) and told.count(".") >= 5
        ):
            bad.append(told)
    return round(100 - 100 * len(bad) / number, 1), bad


SAMPLES = (
    "Tell me a story about Mia and a lamp.",
    "Write a short story about Zorblax who lost a teleporter.",
    "Tell me a story about a dragon.",
    "Tell me a story.",
    "What is the capital of Spain?",
    "Who won the match yesterday?",
    "How are you?",
    "I had a long day at work.",
    "Hello!",
    "What can you do?",
    "How many circles are there?",
    "What is 48 + 37?",
    "What is 123 + 456?",
    "What is 12 * 13?",
    "Change red to blue in this text and repeat it: The red car is faster than the red bike.",
    "Replace Alice with Bob: Alice met Carol and Alice was happy.",
    "Here is a list: milk, eggs, flour. Remove eggs from the list.",
    "List: tea, sugar\nAdd lemon to the end of the list.",
    "Repeat this: Jupyter notebooks are fun, aren't they?",
    "Tom has the ball. Mia is in the garden. Tom gives the ball to Mia. Where is the ball?",
    "Replace x with counter in this text:\nfor x in range(10): print(x)",
)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--tokenizer")
    parser.add_argument("--corpus", default=".data/corpus.json.gz")
    parser.add_argument("--rows", type=int, default=40, help="conversations of each set")
    parser.add_argument("--sets", default=",".join(("seen", "words", *STYLES)))
    parser.add_argument("--stories", type=int, default=0, help="generate and check so many stories, and some refusals")
    parser.add_argument("--samples", action="store_true", help="print free answers too")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    net = load(args.model, getattr(torch, args.dtype), device)
    tables = {}
    for name in filter(None, args.sets.split(",")):
        tables[name] = score(net, args.corpus, name, args.rows, args.tokenizer)
        print(
            f"{name:7s}",
            " ".join(f"{kind}={share}({number})" for kind, (share, number) in tables[name].items()),
            flush=True,
        )
    if args.stories:
        talker = make_talker(args.corpus, tokenizer_path=args.tokenizer)
        for name, (share, bad) in (
            ("stories", stories(net, talker, args.stories)),
            ("declines", declines(net, talker)),
        ):
            tables[name] = share
            print(name, share, *bad, sep="\n   ", flush=True)
    if args.json:
        args.json.write_text(json.dumps(tables, indent=1))
    if args.samples:
        talker = make_talker(args.corpus, tokenizer_path=args.tokenizer)
        for question in SAMPLES:
            print("Q:", question, "\nA:", answer(net, talker, question), flush=True)
        picture = draw(
            [
                ("circle", "red", 0.2, 0.3),
                ("square", "blue", 0.5, 0.6),
                ("circle", "red", 0.8, 0.3, "small"),
                ("star", "green", 0.85, 0.75),
            ],
            (256, 192),
        )
        for question in (
            "How many red circles are there, and what is left of the square?",
            "Describe the picture.",
            "Where is the star?",
            "Is there a dog?",
        ):
            print("Q (picture):", question, "\nA:", answer(net, talker, question, [picture]), flush=True)


if __name__ == "__main__":
    main()
