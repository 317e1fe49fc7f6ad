"""Conversations as rows of token ids, and whole batches in fixed-size arrays.

A row holds one conversation that fills it (the Gated DeltaNet state would run through a boundary), padded
on the right with `<|endoftext|>`. Only answers and their `<|im_end|>` are targets.
"""

from dataclasses import dataclass, field

import numpy as np

from . import questions, talk, tasks
from .scenes import GROUND_FIELDS, MOST, MOST_TOKENS, SHAPE_FIELDS, random_scene
from .tokenizer import ID
from .words import pick

KINDS = (
    "none",
    "count",
    "colour",
    "shape",
    "relation",
    "where",
    "place",
    "beside",
    "exists",
    "describe",
    "both",
    "pictures",
    "edit",
    "list",
    "copy",
    "sum",
    "storyqa",
    "story",
    "chat",
    "refuse",
)
PICTURE_KINDS = KINDS[1:12]
KIND = {name: i for i, name in enumerate(KINDS)}
SYSTEM = (
    "You are a helpful assistant.",
    "You are a helpful assistant.",
    "Answer briefly.",
    "Be brief.",
    "You are a friendly assistant.",
    "Be concise and correct.",
    "You are tfmagic.",
    "You answer questions about pictures.",
    "Answer in English.",
    "You are a careful editor.",
    "Help the user.",
    "Be kind.",
)
TEXT_MAKERS, TEXT_WEIGHTS = zip(
    *(
        (tasks.edit, 7),
        (tasks.lists, 6),
        (tasks.copy, 5),
        (tasks.sums, 4),
        (tasks.holders, 4),
        (talk.story, 3),
        (talk.chat, 2.5),
        (talk.refuse, 3),
    )
)
PICTURES = (1, 2, 3, 4), (64, 20, 9, 7)
TOKENS_EACH = {1: MOST_TOKENS, 2: 64, 3: 42, 4: 36}  # largest pictures by how many there are, in rows of 320
LONGEST_PICTURE = 4 * MOST_TOKENS  # patches


@dataclass
class Row:
    """One conversation: ids, answer spans (kind, start, end), and pictures with their first rows."""

    ids: list
    spans: list
    scenes: list
    starts: list = field(default_factory=list)


class Talker:
    """Makes conversations out of an encoder and a vocabulary."""

    def __init__(
        self, encoder, words, text_share=0.45, turns=None, makers=TEXT_MAKERS, weights=TEXT_WEIGHTS, scene=random_scene
    ):
        self.encoder, self.words, self.text_share, self.turns = encoder, words, text_share, turns
        self.makers, self.weights, self.scene = makers, weights, scene
        encode = encoder.encode
        self._user = [ID["<|im_start|>"], *encode("user\n")]
        self._system = [ID["<|im_start|>"], *encode("system\n")]
        self._answer = [ID["<|im_end|>"], *encode("\n"), ID["<|im_start|>"], *encode("assistant\n")]
        self._end, self._newline = [ID["<|im_end|>"]], encode("\n")

    def text_turns(self, draw):
        """One text turn, or two that belong together -> list of (question, answer, kind)."""
        turn = draw.choices(self.makers, self.weights)[0](draw, self.words)
        return turn if isinstance(turn, list) else [turn]

    def _new_scenes(self, draw, length):
        number = draw.choices(*PICTURES)[0]
        most = MOST_TOKENS if length > 600 else TOKENS_EACH[number]
        return [self.scene(draw, most) for _ in range(number)]

    def _picture_turn(self, draw, shown, new):
        """A turn about the pictures shown; `new` of them come with it."""
        if len(shown) > 1 and draw.random() < (0.45 if new != 1 else 0.25):
            return questions.across(draw, shown)
        if new == 1:
            suffix = None if len(shown) == 1 or draw.random() < 0.3 else ""
            return questions.single(draw, shown, len(shown) - 1, suffix)
        return questions.single(draw, shown, int(draw.random() * len(shown)))

    def row(self, draw, length, text_only=None):
        """A conversation of at most `length` tokens."""
        if text_only is None:
            text_only = draw.random() < self.text_share
        waiting = [] if text_only else self._new_scenes(draw, length)
        self.words.longest = 1100 if length > 600 and draw.random() < 0.3 else 320
        at_once = draw.random() < 0.5
        row, shown, queue = Row(self._opening(draw), [], []), [], []
        while True:
            new = []
            if queue:
                turn = queue.pop(0)
            elif waiting and (not shown or at_once or draw.random() < 0.4):
                new = waiting if at_once else waiting[:1]
                turn = self._picture_turn(draw, shown + new, len(new))
            elif shown and draw.random() > 0.12:
                turn = self._picture_turn(draw, shown, 0)
            elif not shown and draw.random() < 0.012:
                turn = questions.single(draw, [self.scene(draw, 40)], 0)[0], talk.NO_PICTURE, "refuse"
            else:
                turn, *queue = self.text_turns(draw)
            if not self._append(row, turn, new, length):
                if row.spans:
                    break
                return self.row(draw, length, text_only)
            shown = shown + new
            waiting = waiting[len(new) :]
            if len(row.ids) > length - 24 or (self.turns and len(row.spans) >= self.turns):
                break
        return row

    def _opening(self, draw):
        u = draw.random()
        if u < 0.65:
            return []
        system = pick(draw, SYSTEM) if u < 0.97 else self.words.sentence(draw).strip() or "Hello."
        return self._system + self.encoder.encode(system) + self._end + self._newline

    def _append(self, row, turn, new, length):
        """Add a turn to `row`; False, and nothing added, when it does not fit."""
        question, answer, kind = turn
        before, starts = list(self._user), []
        for scene in new:
            before.append(ID["<|vision_start|>"])
            starts.append(len(row.ids) + len(before))
            before += [ID["<|image_pad|>"]] * scene.tokens + [ID["<|vision_end|>"]]
        before += self.encoder.encode(question) + self._answer
        reply = self.encoder.encode(answer) + self._end
        start = len(row.ids) + len(before)
        if start + len(reply) > length:
            return False
        row.spans.append((KIND[kind], start, start + len(reply)))
        row.ids += before + reply + self._newline
        row.scenes += new
        row.starts += starts
        del row.ids[length:]
        return True


def positions(row, length):
    """M-RoPE positions [3, length]: text counts on, a picture spans its rows and columns."""
    out = np.empty((3, length), np.int16)
    at, current = 0, 0
    for start, scene in zip(row.starts, row.scenes):
        out[:, at:start] = np.arange(current, current + start - at)
        current += start - at
        y, x = np.divmod(np.arange(scene.tokens), scene.columns)
        out[:, start : start + scene.tokens] = current + np.stack([0 * y, y, x])
        at, current = start + scene.tokens, current + max(scene.columns, scene.rows)
    out[:, at:] = np.arange(current, current + length - at)
    return out


_ORDER = {}


def patch_order(columns, rows):
    """(row, column) of every 16-pixel patch, four patches of a token together. uint8 [4 * tokens]."""
    if (columns, rows) not in _ORDER:
        y, x, dy, dx = np.meshgrid(np.arange(rows), np.arange(columns), np.arange(2), np.arange(2), indexing="ij")
        _ORDER[columns, rows] = (2 * y + dy).ravel().astype(np.uint8), (2 * x + dx).ravel().astype(np.uint8)
    return _ORDER[columns, rows]


@dataclass(frozen=True)
class Layout:
    """Sizes of one batch: every array has a fixed shape, so a step can be a CUDA graph."""

    rows: int
    length: int

    @property
    def tokens(self):
        return self.rows * self.length

    @property
    def patches(self):
        return -(-self.tokens * 33 // 64 // 128) * 128

    @property
    def pictures(self):
        return self.tokens // 200

    @property
    def targets(self):
        return -(-self.tokens * 37 // 100 // 128) * 128

    @property
    def segments(self):
        return self.pictures + self.patches // 128 + 2

    def fields(self):
        """name -> (numpy dtype, shape)."""
        r, t, p, m, n = self.rows, self.length, self.patches, self.targets, self.pictures
        return {
            "shapes": (np.float32, (n, MOST, SHAPE_FIELDS)),
            "grounds": (np.float32, (n, GROUND_FIELDS)),
            "slot": (
                np.int32,
                (p // 4,),
            ),  # flat row that a picture token replaces; tokens of unused patches go to row `tokens`
            "source": (np.int32, (m,)),
            "segment": (np.int32, (self.segments,)),
            "size": (np.int32, (8,)),
            "ids": (np.int16, (r, t)),
            "positions": (np.int16, (3, r, t)),
            "picture": (np.int16, (p,)),
            "target": (np.int16, (m,)),
            "answer": (np.int16, (m,)),
            "patch_row": (np.uint8, (p,)),
            "patch_column": (np.uint8, (p,)),
            "grid_rows": (np.uint8, (p,)),
            "grid_columns": (np.uint8, (p,)),
            "weight": (np.uint8, (m,)),
            "kind": (np.uint8, (m,)),
        }

    def offsets(self):
        """name -> (byte offset, dtype, shape), 16-byte aligned, and the total size in bytes."""
        table, at = {}, 0
        for name, (dtype, shape) in self.fields().items():
            table[name] = at, dtype, shape
            at += -(-int(np.prod(shape)) * np.dtype(dtype).itemsize // 16) * 16
        return table, at

    def views(self, buffer):
        """The arrays over one buffer of that size."""
        return {
            name: np.frombuffer(buffer, dtype, int(np.prod(shape)), at).reshape(shape)
            for name, (at, dtype, shape) in self.offsets()[0].items()
        }


def fill(arrays, layout, talker, draw, rows=None):
    """Write one batch into `arrays` (see Layout.fields). -> its scenes, in order."""
    length, patch, picture, target, scenes = layout.length, 0, 0, 0, []
    arrays["ids"].fill(ID["<|endoftext|>"])
    for name in ("shapes", "grounds", "patch_row", "patch_column", "weight", "kind", "target", "source", "answer"):
        arrays[name].fill(0)
    arrays["grounds"][:, 9] = arrays["grounds"][:, 14] = arrays["grounds"][:, 20] = (
        8  # unused pictures: no zero periods
    )
    arrays["grounds"][:, 11] = arrays["grounds"][:, 18] = 1
    arrays["picture"].fill(layout.pictures - 1)
    arrays["grid_rows"].fill(2)
    arrays["grid_columns"].fill(2)
    arrays["slot"].fill(layout.tokens)
    segment, answers = [0], 0
    for r in range(layout.rows):
        row = rows[r] if rows else talker.row(draw, length)
        while not rows and (
            patch + 4 * sum(s.tokens for s in row.scenes) > layout.patches
            or picture + len(row.scenes) >= layout.pictures
        ):
            row = talker.row(draw, length, text_only=True)
        arrays["ids"][r, : len(row.ids)] = row.ids
        arrays["positions"][:, r] = positions(row, length)
        for start, scene in zip(row.starts, row.scenes):
            many, first = 4 * scene.tokens, patch // 4
            part = slice(patch, patch + many)
            arrays["patch_row"][part], arrays["patch_column"][part] = patch_order(scene.columns, scene.rows)
            arrays["picture"][part], arrays["grid_rows"][part], arrays["grid_columns"][part] = (
                picture,
                2 * scene.rows,
                2 * scene.columns,
            )
            arrays["slot"][first : first + scene.tokens] = r * length + start + np.arange(scene.tokens)
            arrays["shapes"][picture], arrays["grounds"][picture] = scene.shape_numbers, scene.ground_numbers
            patch, picture = patch + many, picture + 1
            segment.append(patch)
            scenes.append(scene)
        for kind, start, end in row.spans:
            many = end - start
            if target + many > layout.targets:
                break
            part = slice(target, target + many)
            arrays["source"][part] = r * length + np.arange(start - 1, end - 1)
            arrays["target"][part], arrays["kind"][part], arrays["weight"][part] = row.ids[start:end], kind, 1
            arrays["answer"][part] = answers
            target, answers = target + many, answers + 1
    segment += list(range(patch + 128, layout.patches, 128)) if patch < layout.patches else []
    arrays["segment"].fill(layout.patches)
    arrays["segment"][: len(segment)] = segment
    arrays["size"][:4] = picture, patch, target, answers
    return scenes
