# ruff: noqa: E501 - tables of phrases, one thought a line
"""Questions about drawn scenes, each with the one right answer.

Every maker takes `(draw, scenes, at)`: a random.Random, the pictures shown so far and the index of the one
that is meant. It returns `(question, answer, kind)` or None when the scene has no clear case of it, so no
answer depends on a near tie.
"""

import itertools

from .scenes import COLOURS, KINDS
from .words import BEASTS, article, capital, join, pick

ORDINALS = ("first", "second", "third", "fourth")
NUMBERS = ("one", "two", "three", "four")
SIDES = {  # what is asked: (spellings, axis, sign)
    "left of": (("left of", "to the left of", "on the left of"), "x", -1),
    "right of": (("right of", "to the right of", "on the right of"), "x", 1),
    "above": (("above", "over", "higher than"), "y", -1),
    "below": (("below", "under", "lower than"), "y", 1),
}
OPPOSITE = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}
CLEAR = 0.06  # of the side: two centres closer than this are on neither side of each other
LEVEL = 0.03  # of the side: closer than this they are in line


def plural(kind):
    return kind + ("es" if kind.endswith("s") else "s")


def full(shape):
    """'big red circle'."""
    return f"{'big' if shape.big else 'small'} {shape.colour} {shape.kind}"


def matches(shape, trait):
    """`trait` = (kind, colour, big), None standing for any."""
    kind, colour, big = trait
    return kind in (None, shape.kind) and colour in (None, shape.colour) and big in (None, shape.big)


def phrase(trait, many=False):
    """A trait in words: 'small red circles', 'blue shape'."""
    kind, colour, big = trait
    words = [] if big is None else ["big" if big else "small"]
    if colour:
        words.append(colour)
    noun = kind or "shape"
    words.append(plural(noun) if many else noun)
    return " ".join(words)


def some_trait(draw, shapes, absent):
    """A trait of one of the shapes, or with chance `absent` a random one."""
    if not shapes or draw.random() < absent:
        kind, colour, big = pick(draw, KINDS), pick(draw, COLOURS), draw.random() < 0.5
    else:
        shape = pick(draw, shapes)
        kind, colour, big = shape.kind, shape.colour, shape.big
    u = draw.random()
    if u < 0.28:
        return kind, None, None
    if u < 0.5:
        return None, colour, None
    if u < 0.84:
        return kind, colour, None
    return (None, None, big) if u < 0.9 else (kind, None, big) if u < 0.95 else (kind, colour, big)


def names_of(shapes, shape, without=None):
    """Traits that fit `shape` and no other one; `without` leaves out the 'colour' or the 'kind'."""
    k, c, b = shape.kind, shape.colour, shape.big
    traits = [(k, None, None), (k, c, None), (None, c, None), (k, None, b), (None, c, b), (None, None, b), (k, c, b)]
    if without:
        traits = [t for t in traits if t[{"kind": 0, "colour": 1}[without]] is None and t != (None, None, None)]
    return [t for t in traits if sum(matches(other, t) for other in shapes) == 1]


def name_of(draw, shapes, shape, without=None):
    """One unique name of `shape` in words, shorter ones preferred, or None."""
    names = names_of(shapes, shape, without)
    return phrase(names[0] if draw.random() < 0.4 else pick(draw, names)) if names else None


def missing_kind(draw, shapes):
    """A kind that no shape has, or None."""
    kinds = [kind for kind in KINDS if all(shape.kind != kind for shape in shapes)]
    return pick(draw, kinds) if kinds else None


def where_suffix(draw, scenes, at):
    """' in the second picture' when several pictures were shown, else mostly ''."""
    if len(scenes) == 1:
        return "" if draw.random() < 0.9 else pick(draw, (" in the picture", " here", " in this picture"))
    if at == len(scenes) - 1 and draw.random() < 0.2:
        return " in the last picture"
    return (f" in the {ORDINALS[at]} picture", f" in picture {at + 1}", f" in picture {NUMBERS[at]}")[draw.choices((0, 1, 2), (6, 2, 1))[0]]


def counted(number, trait):
    """'There are 3 red circles.'"""
    return f"There {'is' if number == 1 else 'are'} {number or 'no'} {phrase(trait, number != 1)}."


def count(draw, shapes, suffix):
    trait = (None, None, None) if draw.random() < 0.2 else some_trait(draw, shapes, 0.12)
    many = phrase(trait, True)
    question = pick(draw, (
        "How many {} are there{}?", "How many {} are there{}?", "How many {} do you see{}?", "Count the {}{}.", "How many {} can you see{}?",
        "What is the number of {}{}?", "Tell me how many {} there are{}.", "How many {} does it show{}?",
    )).format(many, suffix)
    return question, counted(sum(matches(s, trait) for s in shapes), trait), "count"


def colour(draw, shapes, suffix):
    ask = (
        "What colour is the {}{}?", "What color is the {}{}?", "Which colour does the {} have{}?", "Tell me the colour of the {}{}.",
        "What is the colour of the {}{}?", "What is the color of the {}{}?",
    )
    if draw.random() < 0.08 and (kind := missing_kind(draw, shapes)):
        return pick(draw, ask).format(kind, suffix), f"There is no {kind}.", "colour"
    if not shapes:
        return None
    order = sorted(shapes, key=lambda s: s.x)
    if draw.random() < 0.12 and _spread(order):
        seen = list(dict.fromkeys(s.colour for s in order))
        return pick(draw, ("Which colours do you see{}?", "What colours are there{}?", "Name the colours{}.")).format(suffix), f"I see {join(seen)}.", "colour"
    shape = pick(draw, shapes)
    same = sorted((s for s in shapes if s.kind == shape.kind), key=lambda s: s.x)
    if 2 <= len(same) <= 3 and draw.random() < 0.25 and _spread(same):
        colours = join([s.colour for s in same])
        return f"What colour are the {plural(shape.kind)}{suffix}?", f"From left to right they are {colours}.", "colour"
    name = name_of(draw, shapes, shape, "colour")
    return name and (pick(draw, ask).format(name, suffix), f"The {name} is {shape.colour}.", "colour")


def _spread(shapes):
    """True if shapes sorted by x lie clearly one after another."""
    return all(b.x - a.x >= LEVEL for a, b in itertools.pairwise(shapes))


def kind_of(draw, shapes, suffix):
    if not shapes:
        return None
    if draw.random() < 0.35:
        axis, sign, name = pick(draw, (("x", -1, "leftmost"), ("x", 1, "rightmost"), ("y", -1, "top"), ("y", 1, "bottom"), ("y", -1, "highest"), ("y", 1, "lowest")))
        order = sorted(shapes, key=lambda s: sign * getattr(s, axis))
        if len(order) > 1 and abs(getattr(order[-1], axis) - getattr(order[-2], axis)) < CLEAR:
            return None
        question = pick(draw, ("What is the {} shape{}?", "Name the {} shape{}.", "Which shape is the {} one{}?")).format(name, suffix)
        return question, f"It is {article(full(order[-1]))}.", "shape"
    shape = pick(draw, shapes)
    name = name_of(draw, shapes, shape, "kind")
    if not name:
        return None
    name = name.removesuffix(" shape")
    question = pick(draw, ("What shape is the {} one{}?", "What is the {} thing{}?", "What kind of shape is the {} one{}?", "Which shape is {}{}?", "What is {}{}?")).format(name, suffix)
    return question, f"It is {article(shape.kind)}.", "shape"


def _pair(draw, shapes):
    """Two shapes with unique names, or None."""
    if len(shapes) < 2:
        return None
    a, b = draw.sample(shapes, 2)
    name_a, name_b = name_of(draw, shapes, a), name_of(draw, shapes, b)
    return (a, b, name_a, name_b) if name_a and name_b else None


def relation(draw, shapes, suffix):
    pair = _pair(draw, shapes)
    if not pair:
        return None
    a, b, name_a, name_b = pair
    axis = pick(draw, "xy")
    gap = getattr(a, axis) - getattr(b, axis)
    if abs(gap) < CLEAR:
        return None
    true = {"x": ("left of", "right of"), "y": ("above", "below")}[axis][gap > 0]
    asked = true if draw.random() < 0.5 else OPPOSITE[true]
    question = pick(draw, ("Is the {} {} the {}{}?", "Is the {} {} the {}{}?", "Would you say the {} is {} the {}{}?", "Does the {} lie {} the {}{}?")).format(
        name_a, pick(draw, SIDES[asked][0]), name_b, suffix)
    return question, f"{'Yes' if asked == true else 'No'}, the {name_a} is {true} the {name_b}.", "relation"


def where(draw, shapes, suffix):
    pair = _pair(draw, shapes)
    if not pair:
        return None
    a, b, name_a, name_b = pair
    dx, dy = a.x - b.x, a.y - b.y
    if any(LEVEL < abs(d) < CLEAR + 0.02 for d in (dx, dy)):
        return None
    words = []
    if abs(dy) > LEVEL:
        words.append("above" if dy < 0 else "below")
    if abs(dx) > LEVEL:
        words.append("left of" if dx < 0 else "right of")
    if not words:
        return None
    question = pick(draw, ("Where is the {} compared to the {}{}?", "Where is the {} relative to the {}{}?", "How does the {} lie to the {}{}?", "Where does the {} lie as seen from the {}{}?")).format(
        name_a, name_b, suffix)
    return question, f"The {name_a} is {' and '.join(words)} the {name_b}.", "where"


def place(draw, shapes, suffix):
    if draw.random() < 0.07 and (kind := missing_kind(draw, shapes)):
        return f"Where is the {kind}{suffix}?", f"There is no {kind}.", "place"
    if not shapes:
        return None
    shape = pick(draw, shapes)
    name = name_of(draw, shapes, shape)
    spots = [0 if v < 0.35 else 1 if 0.41 < v < 0.59 else 2 if v > 0.65 else None for v in (shape.x, shape.y)]
    if not name or None in spots:
        return None
    column, row = spots
    at = (("at the top left", "at the top", "at the top right"), ("on the left", "in the middle", "on the right"),
          ("at the bottom left", "at the bottom", "at the bottom right"))[row][column]
    question = pick(draw, ("Where is the {}{}?", "Where is the {}{}?", "Where do you see the {}{}?", "In which part of the picture is the {}{}?")).format(name, suffix)
    return question.replace("of the picture is", "is") if suffix else question, f"The {name} is {at}.", "place"


def beside(draw, shapes, suffix):
    if not shapes:
        return None
    asked = pick(draw, tuple(SIDES))
    spellings, axis, sign = SIDES[asked]
    if draw.random() < 0.05 and (kind := missing_kind(draw, shapes)):
        return f"What is {pick(draw, spellings)} the {kind}{suffix}?", f"There is no {kind}.", "beside"
    shape = pick(draw, shapes)
    name = name_of(draw, shapes, shape)
    others = [s for s in shapes if s is not shape]
    gaps = [sign * (getattr(s, axis) - getattr(shape, axis)) for s in others]
    if not name or any(abs(gap) < CLEAR for gap in gaps):
        return None
    there = sorted((s for s, gap in zip(others, gaps) if gap > 0), key=lambda s: s.x)
    if len(there) > 3 or not _spread(there):
        return None
    question = pick(draw, ("What is {} the {}{}?", "What is {} the {}{}?", "What do you see {} the {}{}?", "Which shapes are {} the {}{}?", "What lies {} the {}{}?")).format(
        pick(draw, spellings), name, suffix)
    if not there:
        return question, f"Nothing is {asked} the {name}.", "beside"
    return question, capital(f"{join([article(full(s)) for s in there])} {'is' if len(there) == 1 else 'are'} {asked} the {name}."), "beside"


def exists(draw, shapes, suffix):
    u = draw.random()
    if u < 0.5 or not shapes:
        trait = some_trait(draw, shapes, 0)
    elif u < 0.85:
        shape = pick(draw, shapes)
        trait = (shape.kind, pick(draw, COLOURS), None) if draw.random() < 0.5 else (pick(draw, KINDS), shape.colour, None)
    else:
        trait = some_trait(draw, shapes, 1)
    name = phrase(trait)
    question = pick(draw, ("Is there {}{}?", "Do you see {}{}?", "Can you see {}{}?", "Does the picture show {}{}?", "Is {} to be seen{}?")).format(article(name), suffix)
    found = any(matches(s, trait) for s in shapes)
    return question, f"Yes, there is {article(name)}." if found else f"No, there is no {name}.", "exists"


def describe(draw, shapes, suffix):
    shapes = sorted(shapes, key=lambda s: s.x)
    if not _spread(shapes):
        return None
    question = pick(draw, ("Describe the picture{}.", "What do you see{}?", "What is in the picture{}?", "Name everything you see{} from left to right.", "What does the picture show{}?", "Describe what you see{}.", "What is this{}?", "What shapes are there{}?", "List all shapes{}.", "Which shapes do you see{}?")).format(suffix)
    question = question.replace("the picture in ", "").replace("in in ", "in ") if suffix else question
    if not shapes:
        return question, "I see no shapes.", "describe"
    number = len(shapes)
    return question, f"I see {number} shape{'s' if number > 1 else ''}: {join([article(full(s)) for s in shapes])}.", "describe"


def stranger(draw, shapes, suffix):
    """Things that are no drawn shape: the model says that it does not see them."""
    thing = pick(draw, [*BEASTS, "house", "car", "tree", "person", "face", "boat", "flower", "hexagon", "heart"])
    question = pick(draw, ("Is there {a}{s}?", "Do you see {a}{s}?", "Can you see {a}{s}?", "Where is the {t}{s}?", "What colour is the {t}{s}?")).format(a=article(thing), t=thing, s=suffix)
    return question, f"I do not see {article(thing)}. I only know simple shapes.", "exists"


MAKERS, WEIGHTS = zip(*((count, 7), (colour, 3), (kind_of, 3), (relation, 13), (where, 8), (place, 5), (beside, 13), (exists, 3), (describe, 4), (stranger, 0.2)))


def single(draw, scenes, at, suffix=None):
    """A question about the picture scenes[at], now and then two in one."""
    shapes = scenes[at].shapes
    suffix = where_suffix(draw, scenes, at) if suffix is None else suffix
    for _ in range(8):
        first = draw.choices(MAKERS, WEIGHTS)[0](draw, shapes, suffix)
        if not first:
            continue
        if draw.random() > 0.17 or not first[0].endswith("?") or first[2] == "describe":
            return first
        second = draw.choices(MAKERS, WEIGHTS)[0](draw, shapes, "")
        if second and second[0].endswith("?") and second[2] != "describe" and second[0] != first[0]:
            glue = pick(draw, (", and ", ", and ", " and "))
            return first[0][:-1] + glue + second[0][0].lower() + second[0][1:], f"{first[1]} {second[1]}", "both"
    return count(draw, shapes, suffix)


def across(draw, scenes):
    """A question about several pictures together."""
    lists = [scene.shapes for scene in scenes]
    number, every = len(lists), [s for shapes in lists for s in shapes]
    u = draw.random()
    trait = (None, None, None) if draw.random() < 0.35 else some_trait(draw, every, 0.05)
    if u < 0.3:
        counts = [sum(matches(s, trait) for s in shapes) for shapes in lists]
        most = [i for i, c in enumerate(counts) if c == max(counts)]
        more = "more" if number == 2 else "the most"
        question = pick(draw, ("Which picture has {m} {t}?", "Which picture shows {m} {t}?", "Where do you see {m} {t}?")).format(m=more, t=phrase(trait, True))
        if len(most) > 1:
            tie = "Both" if number == 2 else "All" if len(most) == number else "Several"
            return question, f"{tie} have the same number.", "pictures"
        return question, f"The {ORDINALS[most[0]]} picture has {more} {phrase(trait, True)}.", "pictures"
    if u < 0.6:
        trait = some_trait(draw, every, 0.08)
        have = [ORDINALS[i] for i, shapes in enumerate(lists) if any(matches(s, trait) for s in shapes)]
        thing = article(phrase(trait))
        question = pick(draw, ("Which picture has {}?", "In which picture is there {}?", "Which pictures show {}?", "Where do you see {}?")).format(thing)
        if not have:
            return question, f"No picture has {thing}.", "pictures"
        verb = "picture has" if len(have) == 1 else "pictures have"
        return question, f"The {join(have)} {verb} {thing}.", "pictures"
    if u < 0.8:
        total = sum(matches(s, trait) for s in every)
        together = "in both pictures" if number == 2 else f"in all {NUMBERS[number - 1]} pictures"
        question = pick(draw, ("How many {} are there {} together?", "How many {} do you see {} together?", "Count the {} {}.")).format(phrase(trait, True), together)
        return question, counted(total, trait), "pictures"
    question = pick(draw, ("How many pictures are there?", "How many pictures did I show you?", "How many pictures do you see?"))
    return question, f"There are {number} pictures.", "pictures"
