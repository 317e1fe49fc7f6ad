# ruff: noqa: E501 - tables of phrases, one thought a line
"""Where the recipe's words come from: the project's own lists, the corpora and an open vocabulary.

Copying must not depend on knowing a word, so about half of all words that the model has to repeat are
made on the spot: random runs of vocabulary pieces, made-up words, numbers, identifiers, other scripts.
`Words` draws them all; everything takes a `random.Random`, so a seed fixes the data.
"""

NAMES = [
    "Mia", "Ben", "Tom", "Ana", "Leo", "Zoe", "Max", "Ida", "Sam", "Eva", "Jon", "Lily", "Omar", "Nina", "Paul",
    "Rosa", "Finn", "Kate", "Hugo", "Vera", "Ada", "Noah", "Emma", "Liam", "Olga", "Ravi", "Mei", "Yuki", "Jack",
    "Ella", "Oscar", "Ruth", "Amir", "Lena", "Theo", "Clara", "Felix", "Nora", "Simon", "Grace", "Peter", "Anna",
    "David", "Sara", "Alice", "Bob", "Carol",
]
THINGS = [
    "ball", "lamp", "book", "key", "hat", "cup", "kite", "drum", "coin", "boat", "box", "bell", "map", "shell",
    "stone", "flower", "rope", "pen", "ring", "basket", "umbrella", "apple", "clock", "spoon", "mirror", "violin",
    "letter", "candle", "feather", "scarf", "whistle", "blanket", "ladder", "bucket", "pencil", "button",
    "telescope",
]
PLACES = [
    "garden", "kitchen", "forest", "school", "barn", "river", "market", "tower", "beach", "attic", "park",
    "library", "cave", "harbour", "meadow", "station", "bakery", "cellar", "village", "museum",
]
BEASTS = [
    "fox", "cat", "dog", "owl", "bear", "mouse", "duck", "horse", "frog", "goat", "rabbit", "hedgehog", "squirrel",
    "otter", "crow", "wolf", "turtle", "donkey", "dragon", "lion", "tiger", "elephant", "monkey", "whale",
    "penguin", "unicorn", "robot", "bird", "fish", "cow", "pig", "sheep", "bee", "giant", "parrot", "camel",
    "zebra", "dinosaur",
]
TRAITS = [
    "old", "little", "quiet", "happy", "brave", "tired", "clever", "lazy", "kind", "young", "grumpy", "curious",
    "gentle", "shy", "cheerful", "hungry", "friendly", "wise",
]
LOOKS = [
    "old", "new", "shiny", "red", "blue", "green", "golden", "tiny", "heavy", "broken", "wooden", "silver",
    "yellow", "small", "big", "white", "black", "strange",
]
COLOURS_OF_THINGS = [
    "red", "blue", "green", "golden", "silver", "yellow", "old", "new", "shiny", "tiny", "strange", "wooden",
]
VERBS = [
    "sees", "likes", "finds", "takes", "carries", "wants", "hides", "holds", "paints", "moves", "draws", "washes",
    "lifts", "drops",
]
PREPOSITIONS = ["near", "behind", "under", "with", "without", "beside", "above", "from", "inside"]

ONSETS = [
    "b", "d", "f", "g", "k", "l", "m", "n", "p", "r", "s", "t", "v", "z", "br", "st", "tr", "pl", "gr", "sh", "ch",
    "w", "h", "j", "th", "qu",
]
VOWELS = ["a", "e", "i", "o", "u", "ai", "ou", "ee"]
CODAS = ["", "", "", "n", "r", "s", "l", "t", "m", "nd", "ck"]
HELD_ONSETS = ["bl", "fr", "kr", "sn", "sk", "dw", "y", "c", "x", "gl", "sp"]
HELD_VOWELS = ["ea", "oi", "ue", "y", "ie", "a", "o"]
HELD_CODAS = ["", "x", "ng", "sp", "b", "rk", "g", "mp"]
MARKS = ".....!?"
SCRIPTS = ((0xC0, 0x17F), (0x391, 0x3C9), (0x410, 0x44F), (0x5D0, 0x5EA), (0x3041, 0x3096), (0x4E00, 0x9FA0), (0xAC00, 0xD7A3), (0x1F300, 0x1F64F), (0x2190, 0x21FF))
FORMS = ("{a}_{b}", "{a}({b})", "{a}.{b}", "{a}-{b}", "{a}/{b}", "{a}@{b}.com", "#{a}", "{n}%", "${n}", "{n}.{m}", "{n}-{m}", "{a}={n}", "{a}[{n}]", "{n}:{m}", "'{a}'", "({a})", "{a}'s", "{A}{B}", "{a}{n}", "<{a}>", "{a},{b}", "*{a}*", "{{{a}}}")


def pick(draw, items):
    """One of `items`, all equally likely."""
    return items[int(draw.random() * len(items))]


def capital(text):
    """`text` with its first letter in upper case."""
    return text[:1].upper() + text[1:]


def article(noun):
    """'an apple', 'a ball'."""
    return ("an " if noun[:1].lower() in "aeiou" else "a ") + noun


def join(items):
    """'a', 'a and b', 'a, b and c'."""
    return items[0] if len(items) == 1 else ", ".join(items[:-1]) + " and " + items[-1]


def invented(draw, syllables, held=False):
    """A made-up word; `held` uses sounds that training never uses."""
    parts = (HELD_ONSETS, HELD_VOWELS, HELD_CODAS) if held else (ONSETS, VOWELS, CODAS)
    return "".join(pick(draw, part) for _ in range(syllables) for part in parts)


CODE = (
    "for {a} in {b}:", "{a} = {b}({c})", "def {a}({b}):", "return {a} + {n}", "print({a})", "if {a} == {n}:", "import {a} as {b}", "{a}.{b}({n}, {c})", "{a} = [{n}, {m}]", "# {a} {b}", "while {a} < {n}:", "x = {a}[{n}]", "return {a}", "{a}: {b}", "<{a}>{b}</{a}>",
)


class Words:
    """An open vocabulary over a corpus (see `corpora`) and the pieces of a tokenizer."""

    def __init__(self, corpus, pieces=(), held=False):
        """`pieces`: texts of ordinary vocabulary ids. `held`: draw words kept out of training."""
        self.corpus, self.pieces, self.held = corpus, list(pieces), held
        self.longest = 320  # characters of a passage
        self.plain = [p for p in self.pieces if p.strip() and "\n" not in p]

    def letters(self, draw):
        """Random letters, mostly lower case."""
        text = "".join(chr(97 + int(draw.random() * 26)) for _ in range(1 + int(draw.random() * 8)))
        return text if draw.random() < 0.7 else text.upper() if draw.random() < 0.5 else capital(text)

    def glued(self, draw):
        """One to four vocabulary pieces glued into one word."""
        if not self.plain:
            return self.letters(draw)
        return "".join(pick(draw, self.plain).strip() for _ in range(1 + int(draw.random() ** 2 * 4)))

    def foreign(self, draw):
        """A short run of characters of one script."""
        first, last = pick(draw, SCRIPTS)
        return "".join(chr(first + int(draw.random() * (last - first + 1))) for _ in range(1 + int(draw.random() * 4)))

    def shaped(self, draw):
        """A word with punctuation or digits inside: an identifier, a price, a time."""
        a, b = (pick(draw, self.corpus["words"]) if draw.random() < 0.5 else self.glued(draw) for _ in "ab")
        n, m = int(10 ** (draw.random() * 5)), int(draw.random() * 100)
        return pick(draw, FORMS).format(a=a, b=b, A=capital(a), B=capital(b), n=n, m=m)

    def unfamiliar(self, draw):
        """A word kept out of training: a held-out English word or one made of held-out sounds."""
        if draw.random() < 0.6:
            return pick(draw, self.corpus["held"])
        return invented(draw, 2 + int(draw.random() * 2), held=True)

    def known(self, draw):
        """A word of the project's lists or of the corpus, common ones first."""
        u = draw.random()
        if u < 0.65:
            return self.corpus["words"][int(draw.random() ** 2 * len(self.corpus["words"]))]
        return pick(draw, pick(draw, (NAMES, THINGS, PLACES, BEASTS, TRAITS, LOOKS)))

    def open(self, draw):
        """A word that nobody could have learnt by heart."""
        u = draw.random()
        if u < 0.5:
            return self.glued(draw)
        if u < 0.68:
            return invented(draw, 1 + int(draw.random() * 4))
        if u < 0.76:
            return self.letters(draw)
        if u < 0.84:
            return str(int(10 ** (draw.random() * 6)))
        return self.shaped(draw) if u < 0.94 else self.foreign(draw)

    def word(self, draw):
        """Any word: half known, half open (all unfamiliar when `held`)."""
        if self.held:
            return self.unfamiliar(draw)
        return self.known(draw) if draw.random() < 0.45 else self.open(draw)

    def noun(self, draw):
        """A thing for a story or a list: a known thing, a plain word or an invented one."""
        u = draw.random()
        if self.held:
            return self.unfamiliar(draw)
        if u < 0.45:
            return pick(draw, THINGS)
        return self.known(draw).lower() if u < 0.75 else invented(draw, 1 + int(draw.random() * 3))

    def name(self, draw):
        """A hero: a listed name, a capitalised word or an invented name."""
        u = draw.random()
        if self.held:
            return capital(self.unfamiliar(draw))
        if u < 0.45:
            return pick(draw, NAMES)
        if u < 0.65:
            return capital(pick(draw, self.corpus["words"]))
        return capital(invented(draw, 1 + int(draw.random() * 3)) if u < 0.9 else self.glued(draw).lower())

    def sentence(self, draw):
        """One sentence of prose, chat, a small grammar or drawn words."""
        u = draw.random()
        if self.held:
            u = 0.3 * u
        if u < 0.3:
            return capital(" ".join(self.word(draw) for _ in range(3 + int(draw.random() * 9)))) + pick(draw, MARKS)
        if u < 0.5:
            return " ".join(self.open(draw) for _ in range(2 + int(draw.random() * 9))) + pick(draw, ("", ".", "."))
        if u < 0.58 and self.pieces:
            return "".join(pick(draw, self.pieces) for _ in range(3 + int(draw.random() * 16))).strip() or "."
        if u < 0.75:
            return pick(draw, self.corpus["prose"])
        if u < 0.88:
            return pick(draw, self.corpus["chat"])
        return (
            f"The {pick(draw, LOOKS)} {self.noun(draw)} {pick(draw, PREPOSITIONS)} the {pick(draw, BEASTS)} is in the {pick(draw, PLACES)}."
            if draw.random() < 0.4
            else f"{self.name(draw)} {pick(draw, VERBS)} the {pick(draw, LOOKS)} {self.noun(draw)} {pick(draw, PREPOSITIONS)} the {pick(draw, PLACES)}."
        )

    def block(self, draw):
        """Two to five lines, indented like code or a note."""
        lines, indent = [], 0
        for _ in range(2 + int(draw.random() * 4)):
            a, b, c = (self.word(draw).strip() for _ in range(3))
            form = pick(draw, CODE)
            line = form.format(a=a, b=b, c=c, n=int(draw.random() * 100), m=int(draw.random() * 10))
            lines.append("    " * indent + (line if draw.random() < 0.75 else self.sentence(draw)[:60].strip()))
            indent = indent + 1 if line.endswith(":") and indent < 2 else max(0, indent - (draw.random() < 0.4))
        return "\n".join(lines)

    def passage(self, draw, longest=None):
        """One to four sentences (more where passages may be long) of at most `longest` characters."""
        longest, parts = longest or self.longest, []
        if draw.random() < 0.12:
            return self.block(draw)
        for _ in range(1 + int(draw.random() ** 1.3 * longest / 80)):
            text = self.sentence(draw)
            if parts and len(" ".join(parts)) + len(text) > longest:
                break
            parts.append(text[:longest])
        return " ".join(parts).strip() or "Yes."
