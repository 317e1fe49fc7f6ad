"""Tokens a round by task, through the engine that ships.

    python -m tfmagic.engine.embedded.drafter.evaluate                    # the shipped drafter
    python -m tfmagic.engine.embedded.drafter.evaluate --drafter DIR --number 8
    python -m tfmagic.engine.embedded.drafter.evaluate --card             # writes the scores into the card, too

Questions are new ones of the generator, one a conversation; pictures are drawn by Pillow, not by the painter that drew
the training pictures. Greedy, and at temperature 1; `block`: the best chain, `tree`: the likeliest 15 guesses, `on`:
the tree, or copied continuation where the context repeats. A round's tokens are its accepted guesses and one more; the
first token of a reply is the prompt's and in no round.
"""

import argparse
import hashlib
import io
import random
import time
from pathlib import Path

import torch

from .. import questions, scenes, talk, tasks
from ..conversation import KINDS
from ..draw import draw as picture
from ..draw import ground_for, shade
from ..evaluate import SIDE
from . import DRAFTER, data

MAKERS = {
    "edit": (tasks.edit,),
    "copy": (tasks.copy,),
    "list": (tasks.lists,),
    "story": (talk.story,),
    "picture": (),
    "chat": (talk.chat, talk.refuse),
    "sum": (tasks.sums,),
    "who has what": (tasks.holders,),
}
DRAFTS = ("block", "tree", "on")
TEMPERATURES = (0.0, 1.0)


@torch.no_grad()
def table(drafter, rows):
    """kind -> (tokens a round, rounds) of a training net along the target's own answers; `ALL`: over all rounds.

    A stand-in for the engine, without running it: each round commits the accepted drafts of the selector's greedy chain
    and one token more.
    """
    tokens, rounds = dict.fromkeys(KINDS, 0), dict.fromkeys(KINDS, 0)
    for n in range(len(rows.ids)):
        row = rows.take(slice(n, n + 1))
        able = data.anchors(row)
        places = able.nonzero()[:, 1]
        if not len(places):
            continue
        longest = torch.zeros(able.shape[1], dtype=torch.long, device=able.device)
        longest[places] = accepted(drafter, row, places[None])[0]
        longest, kinds, good = longest.tolist(), row.kinds[0].tolist(), able[0].tolist()
        for at in (a for a in range(2, len(kinds)) if good[a] and not kinds[a - 2]):  # an answer's first token
            end = kinds.index(0, at)
            while at < end and good[at]:
                tokens[KINDS[kinds[at]]] += longest[at] + 1
                rounds[KINDS[kinds[at]]] += 1
                at += longest[at] + 1
    found = {kind: (tokens[kind] / rounds[kind], rounds[kind]) for kind in KINDS if rounds[kind]}
    total = sum(rounds.values())
    return {**found, "ALL": (sum(tokens.values()) / max(1, total), total)}


def accepted(drafter, rows, at):
    """Guesses accepted behind each anchor, int64 like `at`."""
    labels, valid = data.blocks(rows, at, drafter.block)
    return ((drafter.draft(rows, at) == labels) & valid).cumprod(-1).sum(-1)


def ready(drafter=DRAFTER, device="auto"):
    """The shipped model with this drafter -> `engine.open.Opened`, every guess verified, whatever rounds take here."""
    from tfmagic.engine.open import Settings
    from tfmagic.engine.open import open as open_model

    opened = open_model(None, device, Settings(drafter=str(drafter)), lambda event: None)
    opened.engine.drafting.curve = None
    return opened


def ask(task, talker, draw):
    """A question of the task -> (messages, encoded images) for `Opened.prepare`."""
    from tfmagic import protocol

    if task != "picture":
        turn = draw.choice(MAKERS[task])(draw, talker.words)
        question = (turn[0] if isinstance(turn, list) else turn)[0]
        return [protocol.Message("user", [protocol.Text(question)])], {}
    scene, file = scenes.random_scene(draw), io.BytesIO()
    colours = [shade(shape.colour, draw) for shape in scene.shapes]
    spec = [(s.kind, c, s.x, s.y, "big" if s.big else "small") for s, c in zip(scene.shapes, colours)]
    size = scene.columns * SIDE, scene.rows * SIDE
    picture(spec, size, "smooth", ground_for(colours, draw), draw.random()).save(file, "png")
    digest = hashlib.sha256(file.getvalue()).hexdigest()
    parts = [protocol.ImageRef(digest, "scene"), protocol.Text(questions.single(draw, [scene], 0)[0])]
    return [protocol.Message("user", parts)], {digest: file.getvalue()}


def reply(opened, messages, encoded, **params):
    """One reply -> its `run.Run`."""
    from tfmagic import protocol
    from tfmagic.engine.stream import Request
    from tfmagic.run import Run, Stream

    record = Run("evaluate", 0.0, streams=[Stream()])
    opened.engine.sink = record.apply
    prompt = opened.prepare(messages, encoded)
    sampling = opened.sampling(protocol.Params(max_tokens=200, **params), prompt)
    # Cold: behind a kept state the drafter would see the rows computed since alone.
    now, new = time.perf_counter(), opened.text.detokenizer
    opened.engine.submit(Request("evaluate", prompt, sampling, 1, now, 0.0, new, cache=False))
    while opened.engine.step():
        pass
    return record


def score(opened, talker, number, seed=4242):
    """(task, draft, temperature) -> (tokens, rounds) of `number` replies each; also the task "all"."""
    found = {}
    for task in MAKERS:
        draw = random.Random(f"{seed} {task}")
        asked = [ask(task, talker, draw) for _ in range(number)]
        for draft in DRAFTS:
            for temperature in TEMPERATURES:
                rounds = []
                for seed_of, (messages, encoded) in enumerate(asked):
                    sampled = {"seed": seed_of, "top_p": 1.0, "top_k": 0} if temperature else {}
                    record = reply(opened, messages, encoded, temperature=temperature, draft=draft, **sampled)
                    rounds += record.streams[0].rounds
                found[task, draft, temperature] = len(rounds) + sum(r.accepted for r in rounds), len(rounds)
        shown = (f"{d} {t:g}: {ratio(found[task, d, t])}" for d in DRAFTS for t in TEMPERATURES)
        print(f"{task:>13}", *shown, flush=True)
    for draft in DRAFTS:
        for t in TEMPERATURES:
            found["all", draft, t] = tuple(sum(found[task, draft, t][i] for task in MAKERS) for i in (0, 1))
    return found


def ratio(pair):
    return f"{pair[0] / pair[1]:.2f}" if pair[1] else "-"


def markdown(found, number):
    """The scores as the card shows them."""
    columns = [(d, t) for t in TEMPERATURES for d in DRAFTS]
    lines = [
        f"Tokens a round, through the engine, {number} new questions a task",
        f"(`python -m tfmagic.engine.embedded.drafter.evaluate --number {number}`): a round's accepted guesses and one",
        "more; the first token of a reply is the prompt's and in no round. `block` verifies the best chain of seven",
        "guesses, `tree` the likeliest fifteen, `on` the tree or, where the context repeats, copied continuation; none",
        "is left out for the time that it takes.",
        "At temperature 1 the choice among guesses knows the noise that the model will draw with.",
        "",
        "| task | " + " | ".join(f"{d}, T = {t:g}" for d, t in columns) + " |",
        "|---|" + "---|" * len(columns),
    ]
    for task in (*MAKERS, "all"):
        name = f"**{task}**" if task == "all" else task
        lines.append(f"| {name} | " + " | ".join(ratio(found[task, d, t]) for d, t in columns) + " |")
    return "\n".join(lines)


def write_scores(card, text):
    """Put `text` in the place of the card's section of scores."""
    head, rest = card.read_text().split("## Scores\n", 1)
    card.write_text(f"{head}## Scores\n\n{text}\n\n## {rest.split('## ', 1)[1]}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafter", type=Path, default=DRAFTER)
    parser.add_argument("--corpus", default=".data/corpus.json.gz")
    parser.add_argument("--number", type=int, default=16, help="questions a task")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--card", action="store_true", help="write the scores into the drafter's README.md")
    args = parser.parse_args()
    from ..feed import make_talker

    text = markdown(score(ready(args.drafter, args.device), make_talker(args.corpus), args.number), args.number)
    print(text)
    if args.card:
        write_scores(args.drafter / "README.md", text)


if __name__ == "__main__":
    main()
