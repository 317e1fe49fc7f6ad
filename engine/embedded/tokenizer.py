"""The 4,096-row byte-level BPE, the chat template and a fast encoder for the recipe.

    python -m tfmagic.engine.embedded.tokenizer --corpus .data/corpus.json.gz

writes `model/tokenizer.json` from the corpora and from turns of the generator itself.
"""

import argparse
import random
import unicodedata
from pathlib import Path

import regex
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from . import MODEL

ROWS = 4096
SPECIALS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<think>",
    "</think>",
    "<|mask|>",
    *tuple(f"<|spare_{i}|>" for i in range(16)),
)
FIRST_SPECIAL = ROWS - len(SPECIALS)
ID = {text: FIRST_SPECIAL + i for i, text in enumerate(SPECIALS)}
# Qwen's split: contractions, words with one leading mark or space, single digits, marks, line ends, spaces.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train(lines):
    """A `tokenizers.Tokenizer` of ROWS rows trained on an iterable of texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=FIRST_SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        min_frequency=2,
        show_progress=False,
    )
    tokenizer.train_from_iterator(lines, trainer)
    assert tokenizer.get_vocab_size() == FIRST_SPECIAL, "too little text for the vocabulary"
    tokenizer.add_special_tokens(list(SPECIALS))
    assert all(tokenizer.token_to_id(text) == i for text, i in ID.items())
    return tokenizer


class Encoder:
    """Texts to ids, one cached split piece at a time: equal to the tokenizer and several times faster."""

    def __init__(self, path=MODEL / "tokenizer.json", cache=200_000):
        self.tokenizer = Tokenizer.from_file(str(path))
        self._split, self._known, self._cache = regex.compile(SPLIT), {}, cache

    def encode(self, text):
        """Ids of a text without special tokens."""
        if not text.isascii():
            text = unicodedata.normalize("NFC", text)
        ids, known = [], self._known
        for piece in self._split.findall(text):
            found = known.get(piece)
            if found is None:
                if len(known) > self._cache:
                    known.clear()
                found = known[piece] = self.tokenizer.encode(piece).ids
            ids += found
        return ids

    def pieces(self):
        """Texts of the ordinary ids that are whole characters."""
        texts = (self.tokenizer.decode([i]) for i in range(FIRST_SPECIAL))
        return [text for text in texts if text and "\ufffd" not in text and text.isprintable()]


def sample_lines(corpus, seed=1, rounds=9000):
    """Texts to train the tokenizer on: corpora, words, and turns of the generator."""
    from . import questions, scenes, talk, tasks, words

    draw, source = random.Random(seed), words.Words(corpus)
    yield from corpus["prose"][:9000]
    yield from corpus["chat"][:16000]
    yield from ("user\n", "assistant\n", "system\n") * 500
    for word in corpus["words"][:6000]:
        yield f"{word} {words.capital(word)} {word}"
    for _ in range(rounds):
        scene = scenes.random_scene(draw)
        turns = [questions.single(draw, [scene], 0), questions.across(draw, [scene, scenes.random_scene(draw)])]
        for maker in (tasks.edit, tasks.lists, tasks.sums, tasks.holders, talk.refuse, talk.chat, talk.story):
            made = maker(draw, source)
            turns += made if isinstance(made, list) else [made]
        for question, answer, _kind in turns:
            yield question
            yield answer


def main():
    from .corpora import load

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--corpus", type=Path, default=".data/corpus.json.gz")
    parser.add_argument("--out", type=Path, default=MODEL / "tokenizer.json")
    args = parser.parse_args()
    train(sample_lines(load(args.corpus))).save(str(args.out))


if __name__ == "__main__":
    main()
