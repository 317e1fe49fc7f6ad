# ruff: noqa: E501 - tables of phrases, one thought a line
"""Text turns with one right answer: copies, edits, lists, sums and questions about who has what.

Every maker takes `(draw, words)` (a random.Random and a `words.Words`) and returns `(question, answer, kind)`.
"""

import re

from .words import NAMES, PLACES, THINGS, article, capital, pick

NTH = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth")
TIMES = {2: ("twice", "two times"), 3: ("three times", "3 times"), 4: ("four times", "4 times")}
TOO_HARD = "I can only add and subtract small numbers."


def give(draw, text, request):
    """A request followed by the text it is about, in one of the usual forms."""
    u = draw.random()
    if u < 0.5:
        return f"{request}: {text}"
    if u < 0.62:
        return f"{request}:\n{text}"
    if u < 0.74:
        return f'{request}: "{text}"'
    if u < 0.84:
        return f"{request}.\n{text}"
    return f"{text}\n{request}." if u < 0.92 else f"{request}.\n\n{text}"


def copy(draw, words):
    if draw.random() < 0.1:
        number = draw.choices((2, 3, 4), (4, 4, 2))[0]
        text = " ".join(words.word(draw) for _ in range(1 + int(draw.random() ** 2 * 3)))
        question = pick(draw, ("Say {t} {n}.", "Write {t} {n}.", "Repeat {t} {n}.", "Write the word {t} {n}.")).format(t=text, n=pick(draw, TIMES[number]))
        return question, " ".join([text] * number), "copy"
    text = words.passage(draw)
    request = pick(draw, (
        "Repeat this", "Say this again", "Copy this text", "Write exactly this", "Repeat after me", "Repeat the text", "Please repeat this",
        "Copy this", "Say", "Repeat", "Echo this", "Repeat this word for word", "Print this text", "Write this again",
    ))
    return give(draw, text, request), text, "copy"


def _units(text):
    """Words of a text as (start, end), outer punctuation left out."""
    spans = []
    for match in re.finditer(r"\S+", text):
        word = match.group()
        left = len(word) - len(word.lstrip("\"'(“"))
        right = len(word.rstrip(".,!?;:\"')”"))
        if right > left:
            spans.append((match.start() + left, match.start() + right))
    return spans


def edit(draw, words):
    """Change, drop, add or swap words in a text; the answer is the changed text alone. At times a second change follows."""
    first = _edit(draw, words)
    if draw.random() > 0.15 or "\n" in first[1]:
        return first
    spans = _units(first[1])
    if len(spans) < 3:
        return first
    start, end = pick(draw, spans)
    old, new = first[1][start:end], words.word(draw)
    same = [span for span in spans if first[1][span[0] : span[1]] == old]
    if first[1].lower().count(old.lower()) != len(same):
        return first
    request = pick(draw, ("Now change {} to {}.", "Now replace {} with {}.", "And change {} to {}.", "Then change {} to {}", "Now also change {} to {}")).format(old, new)
    return [first, (request, _replaced(first[1], same, new), "edit")]


def _edit(draw, words):
    u = draw.random()
    for _ in range(20):
        text = words.passage(draw, min(words.longest, 700) - 60)
        spans = _units(text)
        if len(spans) < 3 or ("\n" in text and u >= 0.7):
            continue
        start, end = pick(draw, spans)
        old = text[start:end]
        same = [span for span in spans if text[span[0]:span[1]] == old]
        alike = sum(text[a:b].lower() == old.lower() for a, b in spans)
        if alike == len(same) and text.count(old) >= len(same):
            break
    else:
        return copy(draw, words)
    if u < 0.7:
        new = words.word(draw)
        if draw.random() < 0.15:
            new += " " + words.word(draw)
        return _replace(draw, text, same, old, new)
    if len(same) > 1 or len(spans) < 4:
        return _replace(draw, text, same, old, words.word(draw))
    if u < 0.8:
        answer = re.sub(r" {2,}", " ", text[:start].rstrip(" ") + text[end:] if start else text[end:].lstrip(" "))
        request = pick(draw, ("Remove the word {} from this text", "Delete {} from this text", "Leave out {} in this text", "Take the word {} out of this text")).format(old)
        return give(draw, text, request), answer.strip(), "edit"
    if u < 0.9:
        new = words.word(draw)
        request = pick(draw, ("Put {n} after {o} in this text", "Add {n} after {o} in this text", "Insert {n} after {o}", "Add the word {n} after the word {o}")).format(n=new, o=old)
        return give(draw, text, request), f"{text[:end]} {new}{text[end:]}", "edit"
    other = pick(draw, [s for s in spans if s[0] != start])
    (a, b), (c, d) = sorted([(start, end), other])
    if sum(text[x:y] == text[other[0]:other[1]] for x, y in spans) > 1:
        return _replace(draw, text, same, old, words.word(draw))
    request = pick(draw, ("Swap {} and {} in this text", "Exchange the words {} and {}", "Swap the words {} and {} in this text")).format(text[a:b], text[c:d])
    return give(draw, text, request), text[:a] + text[c:d] + text[b:c] + text[a:b] + text[d:], "edit"


def _replaced(text, spans, new):
    """`text` with `new` in the place of every span."""
    parts, at = [], 0
    for start, end in spans:
        parts += [text[at:start], new]
        at = end
    return "".join(parts) + text[at:]


def _replace(draw, text, spans, old, new):
    answer = _replaced(text, spans, new)
    if draw.random() < 0.35:
        question = pick(draw, (
            "Change {o} to {n} in this text and repeat it: {t}", "Repeat this text, but with {n} instead of {o}: {t}", "Please write {n} for {o} in this text: {t}",
            "Change {o} to {n}: {t}", "In this text, change {o} to {n} and repeat it: {t}", "{t}\nChange {o} to {n}.", 'In the text "{t}", replace {o} with {n}.', 'In the sentence "{t}", change {o} to {n}.', "Please change {o} to {n} in the following sentence: {t}", '{t}\n\nReplace "{o}" with "{n}".',
        )).format(o=old, n=new, t=text)
        return question, answer, "edit"
    request = pick(draw, (
        "Replace {o} with {n}", "Change {o} to {n} in this text and repeat it", "Change {o} to {n} in this text", "Change the word {o} to {n}", 'Replace "{o}" with "{n}"',
        "Replace {o} by {n} in this text", "In the following text, change {o} to {n}", "Please replace {o} with {n}", "Change every {o} to {n}", "Use {n} instead of {o}",
        "Write {n} instead of {o} in this text", "Change '{o}' to '{n}' in this text and repeat it", "Rewrite this text with {n} instead of {o}",
    )).format(o=old, n=new)
    return give(draw, text, request), answer, "edit"


def items(draw, words):
    """One to nine different list items, mostly three and more."""
    wanted, found = (1 + int(draw.random() * 2)) if draw.random() < 0.15 else 3 + int(draw.random() ** 1.3 * 7), []
    two = draw.random() < 0.2
    while len(found) < wanted:
        item = words.word(draw) + (" " + words.word(draw) if two and draw.random() < 0.5 else "")
        if item not in found and "," not in item and not item.endswith("."):
            found.append(item)
    return found


def show(things, form):
    """A list as 'a, b, c', as '- a' lines, as numbered lines or as plain lines."""
    if form == "comma":
        return ", ".join(things)
    mark = {"dash": lambda i: "- ", "number": lambda i: f"{i + 1}. ", "line": lambda i: ""}[form]
    return "\n".join(mark(i) + thing for i, thing in enumerate(things))


def lists(draw, words):
    """Add to, remove from, reorder or look into a list, at times in several turns; the answer keeps the list's form."""
    things = items(draw, words)
    form = draw.choices(("comma", "dash", "number", "line"), (6, 2, 1.5, 1))[0]
    if len(things) < 2 and form == "line":
        form = "dash"
    if len(things) > 1 and draw.random() < 0.1:
        return _ask_list(draw, things, form)
    request, out = _change(draw, words, things)
    turns = [(_give_list(draw, show(things, form), request, form), show(out, form), "list")]
    while draw.random() < 0.25 and 2 < len(out) < 9:
        request, out = _change(draw, words, out)
        start = pick(draw, ("Now ", "And now ", "Then ", "Please ", ""))
        request = start + (request[0].lower() + request[1:] if start else request)
        turns.append((request + pick(draw, (".", "")), show(out, form), "list"))
    return turns


def _change(draw, words, things):
    """A change of a list in words, and the changed list."""
    index = int(draw.random() * len(things))
    item, new, out = things[index], words.word(draw).replace(",", ""), list(things)
    u = draw.random() if len(things) > 1 else 0.4 + 0.45 * draw.random()
    if u < 0.22:
        request = pick(draw, ("Remove {} from the list", "Delete {} from the list", "Take {} off the list", "Remove {}", "Drop {} from this list")).format(item)
        out.pop(index)
    elif u < 0.33:
        request = pick(draw, ("Remove the {} item of the list", "Delete the {} item", "Remove the {} item from this list")).format(NTH[index])
        out.pop(index)
    elif u < 0.4:
        request = pick(draw, ("Remove the last item", "Delete the last item of the list"))
        out.pop()
    elif u < 0.56:
        request = pick(draw, ("Add {} to the end of the list", "Add {} to the list", "Put {} at the end", "Append {} to this list", "Add {}")).format(new)
        out.append(new)
    elif u < 0.65:
        request = pick(draw, ("Put {} at the start of the list", "Add {} at the beginning", "Add {} to the front of the list")).format(new)
        out.insert(0, new)
    elif u < 0.75:
        request = pick(draw, ("Put {n} after {i}", "Insert {n} after {i}", "Add {n} after {i} in the list")).format(n=new, i=item)
        out.insert(index + 1, new)
    elif u < 0.86:
        request = pick(draw, ("Replace {i} with {n}", "Change {i} to {n} in the list", "Replace {i} by {n} in this list")).format(n=new, i=item)
        out[index] = new
    elif u < 0.93:
        request = pick(draw, ("Swap the first and the last item", "Exchange the first and the last item"))
        out[0], out[-1] = out[-1], out[0]
    else:
        request = pick(draw, ("Write the list backwards", "Reverse the list", "Reverse this list"))
        out.reverse()
    return request, out


def _give_list(draw, text, request, form):
    if form != "comma":
        return pick(draw, ("{r}:\n{t}", "Here is a list:\n{t}\n{r}.", "List:\n{t}\n\n{r}.", "{t}\n{r}.")).format(r=request, t=text)
    return pick(draw, ("{r}: {t}", "Here is a list: {t}. {r}.", "List: {t}\n{r}.", "My list: {t}. {r}.", "{t}\n{r}.", "{r}.\n{t}")).format(r=request, t=text)


def _ask_list(draw, things, form):
    index = int(draw.random() * len(things))
    u = draw.random()
    if u < 0.4:
        request, answer = "How many items are in the list?", f"There are {len(things)} items."
    elif u < 0.8:
        request = pick(draw, ("What is the {} item?", "Which item is the {} one?", "Tell me the {} item.")).format(NTH[index])
        answer = f"The {NTH[index]} item is {things[index]}."
    else:
        request, answer = "What is the last item?", f"The last item is {things[-1]}."
    return f"List:{' ' if form == 'comma' else chr(10)}{show(things, form)}\n{request}", answer, "list"


def sums(draw, words):
    """Sums and differences of small numbers; larger arithmetic is declined."""
    u = draw.random()
    top = 1000 if u < 0.15 else 100 if u < 0.75 else 20
    a, b = int(draw.random() * top), int(draw.random() * top)
    v = draw.random()
    if v < 0.06:
        a, b = 1000 + int(draw.random() * 10 ** 6), 2 + int(draw.random() * 10 ** 5)
        sign = pick(draw, ("*", "/", "x", "times", "divided by", "^"))
        return pick(draw, ("What is {} {} {}?", "How much is {} {} {}?", "{} {} {} =")).format(a, sign, b), TOO_HARD, "sum"
    if v < 0.5:
        question = pick(draw, ("What is {} + {}?", "How much is {} plus {}?", "Add {} and {}.", "{} + {} =", "{}+{}=?", "Calculate {} + {}.", "What is {} plus {}?", "{} + {}"))
        return question.format(a, b), f"{a} + {b} = {a + b}.", "sum"
    if v < 0.75:
        if draw.random() < 0.7:
            a, b = max(a, b), min(a, b)
        question = pick(draw, ("What is {} - {}?", "How much is {} minus {}?", "{} - {} =", "{}-{}=?", "Calculate {} - {}.", "What is {} minus {}?"))
        return question.format(a, b), f"{a} - {b} = {a - b}.", "sum"
    if v < 0.85:
        a, b, c = a % 50, b % 50, int(draw.random() * 20)
        question = pick(draw, ("What is {} + {} + {}?", "Add {}, {} and {}.", "How much is {} + {} + {}?"))
        return question.format(a, b, c), f"{a} + {b} + {c} = {a + b + c}.", "sum"
    return _told_sum(draw, words)


def _told_sum(draw, words):
    """A sum told with people and things."""
    name, thing = words.name(draw), pick(draw, THINGS)
    a, b = 2 + int(draw.random() * 30), 1 + int(draw.random() * 20)
    many = thing + ("es" if thing.endswith(("x", "s", "sh")) else "s")
    if draw.random() < 0.5:
        return f"{name} has {a} {many} and gets {b} more. How many {many} does {name} have?", f"{a} + {b} = {a + b}.", "sum"
    a, b = max(a, b), min(a, b)
    return f"{name} has {a} {many} and gives away {b}. How many {many} does {name} have left?", f"{a} - {b} = {a - b}.", "sum"


def distinct(draw, maker, number):
    """`number` different draws of `maker(draw)`."""
    found = []
    while len(found) < number:
        item = maker(draw)
        if item not in found:
            found.append(item)
    return found


def holders(draw, words):
    """Who has what and where is it, after some moves and gifts told in sentences."""
    known = not words.held and draw.random() < 0.5
    people = distinct(draw, (lambda d: pick(d, NAMES)) if known else words.name, 2 + int(draw.random() * 2))
    objects = distinct(draw, (lambda d: pick(d, THINGS)) if known else words.noun, 1 + int(draw.random() * 2))
    places = distinct(draw, (lambda d: pick(d, PLACES)) if known or draw.random() < 0.5 else words.noun, 5)
    at = {person: pick(draw, places) for person in people}
    told, has = [f"{person} is in the {at[person]}." for person in people], {}
    for thing in objects:
        has[thing] = pick(draw, people)
        told.append(f"{has[thing]} has the {thing}.")
    for _ in range(int(draw.random() * 6)):
        person, thing = pick(draw, people), pick(draw, objects)
        if draw.random() < 0.45:
            at[person] = pick(draw, places)
            told.append(f"{person} {pick(draw, ('goes', 'walks', 'runs'))} to the {at[person]}.")
        else:
            giver, taker = has[thing], pick(draw, [p for p in people if p != has[thing]])
            has[thing] = taker
            told.append(f"{giver} gives the {thing} to {taker}.")
    story, u = " ".join(told), draw.random()
    if u < 0.35:
        thing = pick(draw, objects)
        question, answer = f"Who has the {thing}?", f"{has[thing]} has the {thing}."
    elif u < 0.6:
        person = pick(draw, people)
        question, answer = f"Where is {person}?", f"{person} is in the {at[person]}."
    elif u < 0.92:
        thing = pick(draw, objects)
        question, answer = f"Where is the {thing}?", f"The {thing} is in the {at[has[thing]]}."
    else:
        thing = pick(draw, [t for t in THINGS if t not in objects])
        question, answer = f"Who has the {thing}?", f"The text does not say who has {article(thing)}."
    return (f"{story} {question}" if draw.random() < 0.7 else f"{capital(question)} {story}"), answer, "storyqa"
