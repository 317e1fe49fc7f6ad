# ruff: noqa: E501 - tables of phrases, one thought a line
"""Tiny stories, small talk and honest refusals."""

import re

from .words import BEASTS, COLOURS_OF_THINGS, NAMES, PLACES, THINGS, TRAITS, article, pick

ABLE = "I can look at pictures of shapes, change texts and lists, add small numbers and tell short stories."
UNKNOWN = f"I do not know that. {ABLE}"
LISTENING = f"I am only a tiny model and cannot chat about that. {ABLE}"
NO_PICTURE = "I do not see a picture. Please show me one."
HELLO = "Hello! Show me a picture or give me a text."
WELCOME = "You are welcome."
BYE = "Goodbye!"
READY = "I am only a tiny model, but I am ready. Show me a picture or give me a text."
SELF = "I am a tiny model that ships with tfmagic."

GREETING = re.compile(r"^(hi|hello|hey|hiya|howdy|good (morning|evening|afternoon|day)|greetings|yo)\b[\w ,]{0,12}[.!?]*$", re.IGNORECASE)
THANKS = re.compile(r"^(ok(ay)?,? |great,? |cool,? )?(thanks|thank you|thx|many thanks)\b[\w ,]{0,20}[.!]*$", re.IGNORECASE)
PARTING = re.compile(r"^(good ?bye|bye|see you|see ya|good night|cya|ttyl|farewell)\b[\w ,]{0,16}[.!]*$", re.IGNORECASE)
FEELING = re.compile(
    r"^((hi|hello|hey),? |so,? |and )?(how are (you|u|things)|how('s| is) (it going|everything|life)|what('s|s| is) (up|new|going on)|how do you (do|feel)|how (are )?you doing|"
    r"are you (ok(ay)?|fine|well|ready|there)|you there)\b[\w ,]{0,16}[.!?]*$", re.IGNORECASE)
ASKING = re.compile(r"\?\s*$|^(who|what|when|where|why|how|which|whose|do|does|did|is|are|can|could|would|will|should|have|has)\b", re.IGNORECASE)


class Cast:
    """The people and things of one story."""

    def __init__(self, draw, words, hero=None, thing=None, beast=None):
        """Whatever the request does not name is something ordinary."""
        self.hero = hero or pick(draw, NAMES)
        self.friend = pick(draw, [name for name in NAMES if name != self.hero])
        self.thing = thing or pick(draw, THINGS)
        self.beast = beast or pick(draw, BEASTS)
        self.place = pick(draw, PLACES)
        self.look = pick(draw, COLOURS_OF_THINGS)
        self.trait = pick(draw, TRAITS)


def lost(draw, c):
    return [
        f"{c.hero} had {article(c.look)} {c.thing}.",
        f"One day {c.hero} lost the {c.thing} in the {c.place}.",
        pick(draw, (f"{c.hero} was sad.", f"{c.hero} looked for it all day.", f"{c.hero} asked {c.friend} for help.")),
        f"Then {article(c.trait)} {c.beast} came and {pick(draw, ('found', 'brought back', 'dug up'))} the {c.look} {c.thing}.",
        f"{c.hero} said thank you to the {c.beast}.",
        pick(draw, (f"{c.hero} and the {c.beast} became friends.", f"{c.hero} gave the {c.beast} some bread.", f"From that day on the {c.beast} often came to visit {c.hero}.")),
    ]


def built(draw, c):
    return [
        f"{c.hero} wanted to make {article(c.thing)}.",
        f"{c.friend} laughed and said that it was too hard.",
        pick(draw, (f"But {c.hero} worked on it every evening in the {c.place}.", f"But {c.hero} went to the {c.place} and tried again and again.")),
        f"{article(c.trait).capitalize()} {c.beast} sat beside {c.hero} and watched.",
        f"At last the {c.thing} was ready, and it was {c.look}.",
        pick(draw, (f"{c.friend} said that it was the best {c.thing} of all.", f"Now {c.friend} wanted one too.", f"{c.hero} showed the {c.thing} to {c.friend}, and both were happy.")),
    ]


def journey(draw, c):
    return [
        f"{c.hero} lived near the {c.place} with {article(c.trait)} {c.beast}.",
        f"One morning they found {article(c.look)} {c.thing} at the door.",
        pick(draw, (f'"Whose is it?" asked {c.hero}.', f"Nobody knew whose {c.thing} it was.")),
        f"They walked all day until they met {c.friend}.",
        f'"That is my {c.thing}!" said {c.friend}.',
        pick(draw, (f"{c.hero} gave the {c.thing} back, and they all had tea together.", f"{c.friend} was so glad that {c.hero} got a cake, and the {c.beast} got some too.")),
    ]


def shared(draw, c):
    return [
        f"{c.hero} and {c.friend} both wanted the {c.look} {c.thing}.",
        pick(draw, (f"They argued about it in the {c.place}.", f"They pulled at it until they fell over in the {c.place}.")),
        f"{article(c.trait).capitalize()} {c.beast} heard them and came closer.",
        f'"Why not take turns?" said the {c.beast}.',
        f"So {c.hero} had the {c.thing} in the morning and {c.friend} had it in the evening.",
        pick(draw, ("And they never argued again.", f"The {c.beast} smiled and went home.", "After that they were the best of friends.")),
    ]


def gift(draw, c):
    return [
        f"It was the birthday of {c.friend}.",
        f"{c.hero} had no money, so {c.hero} went to the {c.place} to think.",
        f"There {c.hero} met {article(c.trait)} {c.beast} with {article(c.look)} {c.thing}.",
        pick(draw, (f"{c.hero} sang a song for the {c.beast}.", f"{c.hero} told the {c.beast} a long story.", f"{c.hero} helped the {c.beast} to cross the road.")),
        f"The {c.beast} was so pleased that it gave {c.hero} the {c.thing}.",
        f"{c.friend} loved the {c.look} {c.thing}.",
    ]


PLOTS = {"lost": lost, "built": built, "journey": journey, "shared": shared, "gift": gift}
FIRST = {"lost": "Who lost the {t}?", "built": "Who made the {t}?", "journey": "Whose was the {t}?", "gift": "Who got the {t} in the end?"}


REQUESTS = (  # of what, and what it names: h hero, f friend, t thing, b beast, p place, l look
    ("about {h} and {at}", "ht"), ("about {h} and {at}", "ht"), ("about {h} and {ab}", "hb"), ("with {h}, {al} {t} and {ab}", "hltB"), ("about {h}, {f} and {at}", "hft"),
    ("about {h}", "h"), ("about {at}", "t"), ("about {ab}", "b"), ("about {h} and {f}", "hf"), ("about {ab} and {at}", "bt"), ("with {ab} and {at}", "bt"),
    ("about {h} in the {p}", "hp"), ("about {al} {t}", "lt"), ("about {h} and {al} {t}", "hlt"), ("about {ab} named {h}", "hb"), ("about a child named {h}", "h"),
    ("about {h}, {ab} and {at}", "hbt"), ("about {h} and the {t}", "ht"), ("about {h} and the {b}", "hb"),
)


def _fitting(named):
    """Plots that bring in first what was asked for, so that a thing never plays an animal."""
    if "t" in named and "b" not in named.lower():
        return "lost", "built", "shared"
    if "b" in named and "t" not in named:
        return "journey", "gift"
    return tuple(PLOTS)


def story(draw, words):
    """A tiny story; now and then the next turn asks about it. -> list of (question, answer, kind)."""
    about, named = pick(draw, REQUESTS) if draw.random() > 0.06 else ("", "")
    plot = pick(draw, _fitting(named))
    if plot == "lost" and draw.random() < 0.3:
        about, named = "about {h} who lost {at}", "ht"
    beast = (words.noun(draw) if draw.random() < 0.4 else None) if "B" in named else None
    thing = words.noun(draw) if "t" in named else None
    while thing in BEASTS:
        thing = words.noun(draw)
    c = Cast(draw, words, words.name(draw) if "h" in named else None, thing, beast)
    told = " ".join(PLOTS[plot](draw, c))
    begin = pick(draw, ("Tell me a", "Tell a", "Write a", "Please tell me a", "Can you tell me a", "Make up a", "I want a"))
    length = pick(draw, ("", "short ", "tiny ", "little ", "nice "))
    mark = "?" if begin.startswith("Can") else pick(draw, (".", ".", ""))
    about = about.format(h=c.hero, f=c.friend, t=c.thing, b=c.beast, p=c.place, at=article(c.thing), ab=article(c.beast), al=article(c.look))
    turns = [(f"{begin} {length}story {about}".rstrip() + mark, told, "story")]
    if draw.random() < 0.5:
        turns.append(_about(draw, plot, c))
    return turns


def _about(draw, plot, c):
    """A question about the story just told."""
    u = draw.random()
    if u < 0.3:
        return f"What colour was the {c.thing}?" if c.look in ("red", "blue", "green", "golden", "silver", "yellow") else f"What was the {c.thing} like?", f"The {c.thing} was {c.look}.", "storyqa"
    if u < 0.5:
        return pick(draw, ("Where did it happen?", "Where was that?", "Which place is in the story?")), f"It happened in the {c.place}." if plot != "journey" else f"It happened near the {c.place}.", "storyqa"
    if u < 0.75:
        return pick(draw, ("Which animal was it?", "Which animal is in the story?", "What animal was there?")), f"It was {article(c.trait)} {c.beast}.", "storyqa"
    if plot == "shared":
        return f"Who wanted the {c.thing}?", f"{c.hero} and {c.friend} wanted the {c.thing}.", "storyqa"
    who = {"lost": f"{c.hero} lost", "built": f"{c.hero} made", "journey": f"It was {c.friend}'s", "gift": f"{c.friend} got"}[plot]
    return FIRST[plot].format(t=c.thing), f"{who} {c.thing}." if plot == "journey" else f"{who} the {c.thing}.", "storyqa"


def reply(line):
    """The honest answer to a line of human talk, by what kind of line it is."""
    line = line.strip()
    for pattern, answer in ((FEELING, READY), (GREETING, HELLO), (THANKS, WELCOME), (PARTING, BYE)):
        if pattern.match(line):
            return answer
    return UNKNOWN if ASKING.search(line) else LISTENING


def chat(draw, words):
    """A line of human talk and the honest answer to it."""
    u = draw.random()
    if u < 0.45:
        line = pick(draw, words.corpus["chat"])
        return line, reply(line), "chat"
    if u < 0.55:
        asked = pick(draw, ("How are you", "How are you today", "How are you doing", "How is it going", "What's up", "what's up", "how are you", "How do you feel", "Hello, how are you", "Are you there", "How's it going", "Hi, how are you", "Are you ready"))
        return asked + pick(draw, ("?", "?", "", "??")), READY, "chat"
    if u < 0.63:
        start = pick(draw, ("Hello", "Hi", "Hey", "Hello there", "Hi there", "Good morning", "Good evening", "Good afternoon", "hello", "hi", "hey there", "Greetings", "Hey model", "Hello tfmagic"))
        return start + pick(draw, ("", "!", ".", "!!")), HELLO, "chat"
    if u < 0.72:
        start = pick(draw, ("Thank you", "Thanks", "Thanks a lot", "Thank you very much", "Great, thanks", "thanks", "Many thanks", "OK thanks", "Thank you so much"))
        return start + pick(draw, ("", "!", ".")), WELCOME, "chat"
    if u < 0.78:
        return pick(draw, ("Goodbye", "Bye", "Bye bye", "See you", "See you later", "Good night", "bye")) + pick(draw, ("", "!", ".")), BYE, "chat"
    if u < 0.9:
        asked = pick(draw, ("Who are you", "What are you", "What is your name", "Are you a person", "Are you human", "Are you a robot", "Tell me who you are", "What model are you", "Which model is this", "Are you ChatGPT", "who are you", "What's your name"))
        return asked + ("." if asked.startswith("Tell") else "?"), SELF, "chat"
    asked = pick(draw, ("What can you do?", "What can I ask you?", "Help", "Help me", "What are you good at?", "How can you help me?", "What do you know?", "What do you do?", "help", "What are your abilities?", "Can you help me?"))
    return asked, ABLE, "chat"


KNOWLEDGE = (
    "What is the capital of {N}?", "Who wrote {N}?", "Who invented the {n}?", "What time is it?", "What day is it today?", "How is the weather in {N}?", "Will it rain tomorrow?",
    "What is the weather today?", "Who is the president of {N}?", "What is the meaning of {n}?", "What does {n} mean?", "Explain {n} to me.", "What is {n}?", "What is a {n}?", "Define {n}.",
    "Where does {N} live?", "How old is {N}?", "When was {N} born?", "Who is {N}?", "Do you know {N}?", "What does a {n} cost?", "How much does a {n} cost?", "Why is the {n} {t}?", "Why do people {n}?",
    "How do I make a {n}?", "How do I get to {N}?", "How far is {N}?", "How tall is the {n}?", "Where is {N}?", "What is your favourite {n}?", "Do you like {n}?", "Do you like {N}?", "Which {n} is the best?",
    "What do you think about {n}?", "Is {n} better than {m}?", "Should I buy a {n}?", "Tell me about {n}.", "Tell me about {N}.", "Tell me something about {n}.", "Tell me a joke.", "Tell me a joke about {n}.",
    "Write a program that sorts a {n}.", "Write code for a {n}.", "Write a poem about {n}.", "Translate {n} into French.", "How do you say {n} in German?", "Give me a recipe for {n}.", "What happened in {y}?",
    "Who won in {y}?", "What is the population of {N}?", "How many people live in {N}?", "What is the news?", "What is the meaning of life?", "Can you write a program?", "Search the web for {n}.", "Play some {n}.",
    "Call {N}.", "What year is it?", "Who is the king of {N}?", "What language do they speak in {N}?", "What is the tallest {n} in the world?", "What is the square root of {y}?", "Why?", "How does a {n} work?",
    "When did {N} die?", "What is the difference between {n} and {m}?", "Are {n} and {m} the same?", "Is {N} nice?", "What should I do today?", "What is the best {n} in {N}?", "Recommend a {n}.", "Who made the {n}?",
)


UNABLE = (
    "Summarize this text", "Translate this text into French", "Translate into {N}", "Sort this list", "Sort these words", "Write this in capital letters", "Count the words in this text",
    "What is this text about", "Explain this text", "Is this text correct", "Correct the mistakes in this text", "Rhyme with this", "Answer this riddle", "Sum up this text", "Continue this text",
)


def refuse(draw, words):
    """A question beyond the model, or one about a picture that was not shown."""
    if draw.random() < 0.12:
        task = pick(draw, UNABLE).format(N=words.name(draw))
        return f"{task}: {words.passage(draw, 160)}", UNKNOWN, "refuse"
    n, m = words.noun(draw), words.noun(draw)
    line = pick(draw, KNOWLEDGE).format(n=n, m=m, N=words.name(draw), t=pick(draw, TRAITS), y=1000 + int(draw.random() * 1100))
    u = draw.random()
    if u < 0.12:
        line = pick(draw, ("Please tell me: ", "I want to know: ", "Question: ", "Tell me, ", "So, ", "Hey, ")) + (line[0].lower() + line[1:] if u < 0.06 else line)
    elif u < 0.18:
        line = line.lower()
    elif u < 0.22:
        line = line.rstrip("?.")
    return line, UNKNOWN, "refuse"
