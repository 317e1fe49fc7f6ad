"""What the drafter learns from: the target's hidden rows and the target's own words.

A conversation of the generator is read by the target once. That pass gives the tapped rows and, behind every row
before an answer token, the token that the target would say. Where the target's text differs from the generator's
(stories, above all), the conversation is also *spoken*: its answers are drawn anew by the target, at temperature 1.
"""

import random
from collections import deque
from typing import NamedTuple

import torch
import torch.nn.functional as F

from .. import MODEL, conversation
from ..conversation import LONGEST_PICTURE, Layout
from ..delta import delta_twin
from ..export import load_weights
from ..feed import Feed, make_talker
from ..net import EMBED, FINAL, LAYER, Net, attention_in, attention_out, gdn_out, rms1p, segments_twin
from ..tokenizer import ID

PAD, END = ID["<|endoftext|>"], ID["<|im_end|>"]


class Rows(NamedTuple):
    """N conversations of L rows."""

    ids: torch.Tensor
    """int64 [N, L]."""
    labels: torch.Tensor
    """int64 [N, L]: the token that the target says behind each row; -1 where the next row is not of an answer."""
    kinds: torch.Tensor
    """int64 [N, L]: the kind (conversation.KINDS) of the answer that the next row is of; 0 outside."""
    taps: torch.Tensor
    """[N, L, T * D] in the target's dtype: the rows after the tapped layers, side by side."""

    def take(self, index):
        return Rows(*(part[index] for part in self))


def blocks(rows, at, block):
    """The drafts asked for at anchors `at` int64 [N, A] -> (labels, valid), each [N, A, block - 1].

    Draft k behind anchor a is row a + k, labelled by row a + k - 1. A label counts while the answer lasts and while
    every token before it is the target's own: the first place where the text left the target's path counts still.
    """
    length = rows.ids.shape[1]
    place = at[..., None] + torch.arange(block - 1, device=at.device)
    inside = place < length - 1
    place = place.clamp(max=length - 2)
    labels, said = _gather(rows.labels, place), _gather(rows.ids, place + 1)
    answer = (inside & (labels >= 0)).cumprod(-1).bool()
    path = F.pad((labels == said).cumprod(-1)[..., :-1], (1, 0), value=1).bool()
    return labels.clamp(min=0), answer & path


def _gather(rows, place):
    return rows.gather(1, place.flatten(1)).view(place.shape)


def anchors(rows):
    """Rows that a round can start at [N, L] bool: the target's own token, with more of its answer to come."""
    own = (rows.labels[:, :-1] >= 0) & (rows.labels[:, :-1] == rows.ids[:, 1:])
    return F.pad(own, (1, 0)) & (rows.labels >= 0)


def choose(rows, number, draw=None):
    """`number` random anchors a row -> (at int64 [N, number], whether each is one [N, number])."""
    able = anchors(rows)
    noise = torch.rand(able.shape, generator=draw, device=able.device)
    score, at = (noise + able.float()).topk(number, 1)
    return at, score > 1


class Target:
    """The shipped model, frozen: reads conversations, and speaks them."""

    def __init__(self, layers, folder=MODEL, device="cpu", rule=delta_twin, segments=segments_twin):
        """`layers`: the tapped ones. The dtype follows the device: bf16 on CUDA, float32 else."""
        dtype = torch.bfloat16 if torch.device(device).type == "cuda" else torch.float32
        weights = {name: tensor.to(device) for name, tensor in load_weights(folder).items()}
        self.layers, self.device = layers, torch.device(device)
        self.net = Net(weights, dtype=dtype, delta=rule, segments=segments)

    @property
    def embedding(self):
        """The table that embeds and, tied, predicts, f32 [V, D]."""
        return self.net.weights[EMBED]

    @property
    def final_scale(self):
        """The final norm's scale, f32 [D]."""
        return 1 + self.net.weights[FINAL]

    @torch.no_grad()
    def read(self, ids, positions, answers, said=None, features=None, slots=None):
        """One teacher-forced pass -> Rows. `answers` [N, L]: the kind of the answer that the NEXT row is of, 0 outside.

        Labels are the target's argmax; with `said` (the ids were drawn by the target) they are the next ids.
        """
        net, kept = self.net, dict.fromkeys(self.layers)
        x = net.read(ids, positions, features, slots, kept)
        taps = torch.cat([kept[i] for i in self.layers], -1).to(net.dtype).view(*ids.shape, -1)
        labels = F.pad(ids[:, 1:], (0, 1), value=PAD)
        if not said:
            spot = answers.flatten().nonzero()[:, 0]
            labels = labels.flatten().index_copy(0, spot, self.predict(x[spot]).argmax(-1)).view(ids.shape)
        return Rows(ids, labels.masked_fill(answers == 0, -1), answers, taps)

    def predict(self, x):
        """Residual rows [M, D] -> logits f32 [M, V]."""
        return F.linear(rms1p(x, self.net.weights[FINAL], self.net.dtype), self.embedding.to(self.net.dtype)).float()

    @torch.no_grad()
    def read_batch(self, arrays):
        """A batch of the generator (conversation.Layout.fields as tensors on the device) -> Rows."""
        net, ids = self.net, arrays["ids"].long()
        pixels = net.f["paint"](*(arrays[n] for n in ("shapes", "grounds", "picture", "patch_row", "patch_column")))
        places = (arrays[n] for n in ("patch_row", "patch_column", "grid_rows", "grid_columns", "segment"))
        features = net.see(pixels, *places, LONGEST_PICTURE)
        return self.read(ids, arrays["positions"], _answers(arrays, ids), False, features, arrays["slot"])

    @torch.no_grad()
    def speak(self, scripts, length, temperature=1.0, draw=None):
        """Conversations without pictures, their answers drawn by the target, all rows of a batch in step.

        `scripts`: of each conversation its prompts as (ids, kind of the answer that follows).
        -> ids, answers (as in `read`), both int64 [N, length]; an answer that does not fit is cut off.
        """
        number = len(scripts)
        ids = torch.full((number, length), PAD, device=self.device)
        answers = torch.zeros(number, length, dtype=torch.long)
        queues, forced = [deque(script) for script in scripts], [deque() for _ in scripts]
        voice, kinds, last, drawn = Voice(self, number, length), [0] * number, [END] * number, [END] * number
        for t in range(length):
            for n in range(number):
                if not forced[n] and last[n] == END:  # an answer is over, or the conversation begins
                    prompt, kinds[n] = queues[n].popleft() if queues[n] else ((), 0)
                    forced[n].extend(prompt)
                last[n] = forced[n].popleft() if forced[n] else drawn[n] if kinds[n] else PAD
            ids[:, t] = torch.tensor(last, device=self.device)
            answers[:, t] = torch.tensor(
                [kind if not queue and id != END else 0 for kind, queue, id in zip(kinds, forced, last)]
            )
            logits = voice.step(ids[:, t], t)
            if temperature > 0:
                noise = torch.rand(logits.shape, generator=draw, device=self.device).clamp_(1e-20)
                logits = logits / temperature - (-noise.log()).log()
            drawn = logits.argmax(-1).tolist()
        answers[:, -1] = 0  # the next row does not exist
        return ids, answers.to(self.device)


def _answers(arrays, ids):
    """The kind of the answer that the next row is of, int64 like ids."""
    used = arrays["weight"].bool()
    answers = torch.zeros(ids.numel(), dtype=torch.long, device=ids.device)
    return answers.index_copy_(0, arrays["source"][used].long(), arrays["kind"][used].long()).view(ids.shape)


class Voice:
    """The target's text part one row at a time, its states kept; conversations without pictures only."""

    def __init__(self, target, number, length):
        net, sizes, device = target.net, target.net.text_sizes, target.device
        self.target, self.number = target, number
        self.full = {i for i in range(sizes["num_hidden_layers"]) if (i + 1) % sizes["full_attention_interval"] == 0}
        heads, width = sizes["num_attention_heads"], sizes["head_dim"]
        self.nk, self.nv, self.dk, self.dv = (
            sizes[f"linear_{n}"] for n in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
        )
        channels = 2 * self.nk * self.dk + self.nv * self.dv
        self.keys, self.values, self.past, self.memory = {}, {}, {}, {}
        for i in range(sizes["num_hidden_layers"]):
            if i in self.full:
                self.keys[i], self.values[i] = (
                    torch.zeros(number, heads, length, width, dtype=net.dtype, device=device) for _ in "kv"
                )
            else:
                self.past[i] = torch.zeros(number, 3, channels, device=device)
                self.memory[i] = torch.zeros(number, self.nv, self.dk, self.dv, device=device)

    def step(self, ids, t):
        """Tokens int64 [N] of row t -> logits f32 [N, V]."""
        net = self.target.net
        x = self.target.embedding[ids]
        angle = t * net.frequency
        angle = torch.cat([angle, angle])[None, None].expand(self.number, 1, -1)
        cos, sin = angle.cos().to(net.dtype), angle.sin().to(net.dtype)
        for i in range(net.text_sizes["num_hidden_layers"]):
            at = f"{LAYER}{i}."
            mlp = ("post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
            tail = net.part(at, *(f"{name}.weight" for name in mlp))
            x = self._attend(i, at, x, t, cos, sin, tail) if i in self.full else self._recall(i, at, x, tail)
        return self.target.predict(x)

    def _attend(self, i, at, x, t, cos, sin, tail):
        net, sizes = self.target.net, self.target.net.text_sizes
        names = ("q_proj", "k_proj", "v_proj", "q_norm", "k_norm")
        weights = net.part(at, "input_layernorm.weight", *(f"self_attn.{name}.weight" for name in names))
        heads = (sizes["num_attention_heads"], sizes["num_key_value_heads"], sizes["head_dim"])
        q, k, v, gate = attention_in(x, cos, sin, *weights, *heads, net.dtype)
        self.keys[i][:, :, t], self.values[i][:, :, t] = k, v
        o = F.scaled_dot_product_attention(q[:, :, None], self.keys[i][:, :, : t + 1], self.values[i][:, :, : t + 1])
        return attention_out(x, o[:, :, 0], gate, *net.part(at, "self_attn.o_proj.weight"), *tail, net.dtype)

    def _recall(self, i, at, x, tail):
        net, dtype = self.target.net, self.target.net.dtype
        norm, qkv, z, b, a, conv, a_log, dt_bias, head_norm, out = net.part(
            at,
            "input_layernorm.weight",
            *(f"linear_attn.in_proj_{n}.weight" for n in ("qkv", "z", "b", "a")),
            *(f"linear_attn.{n}" for n in ("conv1d.weight", "A_log", "dt_bias", "norm.weight", "out_proj.weight")),
        )
        h = rms1p(x, norm, dtype)
        window = torch.cat([self.past[i], F.linear(h, qkv.to(dtype)).float()[:, None]], 1)
        self.past[i] = window[:, 1:]
        mixed = F.silu((window * conv[:, 0].T.to(dtype).float()).sum(1))
        keys = self.nk * self.dk
        q, k, v = mixed.split([keys, keys, self.nv * self.dv], -1)
        q, k = (r.view(-1, self.nk, self.dk) for r in (q, k))
        q, k = (r * torch.rsqrt(r.pow(2).sum(-1, keepdim=True) + 1e-6) for r in (q, k))
        q, k = (r.repeat_interleave(self.nv // self.nk, 1)[..., None] for r in (q * self.dk**-0.5, k))
        beta = torch.sigmoid(F.linear(h, b.to(dtype)).float())[..., None]
        g = -a_log.exp() * F.softplus(F.linear(h, a.to(dtype)).float() + dt_bias)
        memory = self.memory[i] * g.exp()[..., None, None]
        change = (v.view(-1, self.nv, self.dv) - (memory * k).sum(2)) * beta
        self.memory[i] = memory = memory + k * change[:, :, None]
        o = (memory * q).sum(2).to(dtype)
        return gdn_out(x, o, F.linear(h, z.to(dtype)), head_norm, out, *tail, dtype)


class Source:
    """Fresh Rows without end: of every so many batches one is spoken."""

    def __init__(self, corpus, layout, workers=0, seed=1, spoken=0.25, voices=32):
        """`workers`: processes that make conversations (forked now: before CUDA starts); 0: made in this one."""
        self.layout, self.spoken, self.voices = layout, spoken, voices
        self.feed = Feed(layout, corpus, seed, workers, 2 * workers) if workers else None
        self.talker = None if workers else make_talker(corpus)
        self.random, self.owed, self.said = random.Random(seed), 0.0, deque()
        self.blob = torch.zeros(layout.offsets()[1], dtype=torch.uint8)

    def batch(self):
        """The generator's next batch: name -> tensor on the CPU, good until the next call."""
        if self.feed:
            self.feed.take(self.blob)
        else:
            conversation.fill(self.layout.views(memoryview(self.blob.numpy())), self.layout, self.talker, self.random)
        return {
            name: torch.from_numpy(array)
            for name, array in self.layout.views(memoryview(self.blob.numpy())).items()
        }

    def fresh(self, target):
        """The next `layout.rows` conversations as Rows."""
        self.owed += self.spoken
        if self.owed < 1:
            return target.read_batch({name: tensor.to(target.device) for name, tensor in self.batch().items()})
        self.owed -= 1
        return self.speak(target)

    def speak(self, target, temperature=1.0):
        """`layout.rows` conversations in the target's own words."""
        rows, length = self.layout.rows, self.layout.length
        if len(self.said) < rows:
            found = []
            while len(found) < max(rows, self.voices):
                found += scripts(self.batch())
            self.said.extend(zip(*target.speak(found[: max(rows, self.voices)], length, temperature)))
        ids, answers = (torch.stack(part) for part in zip(*(self.said.popleft() for _ in range(rows))))
        return target.read(ids, torch.arange(length, device=ids.device).expand(3, rows, -1), answers, True)

    def close(self):
        if self.feed:
            self.feed.close()


def scripts(arrays):
    """Of each conversation of a batch without a picture its prompts, as (ids, kind of the answer that follows)."""
    ids, found = arrays["ids"].long(), []
    answers = _answers(arrays, ids)
    for row, kinds in zip(ids, answers):
        if (row == ID["<|image_pad|>"]).any():
            continue
        prompts, at = [], 0
        for start in (F.pad(kinds > 0, (1, 0)).int().diff() > 0).nonzero()[:, 0].tolist():
            end = start + int((kinds[start:] == 0).nonzero()[0])  # the row of the answer's end token
            prompts.append((row[at : start + 1].tolist(), int(kinds[start])))
            at = end + 1
        found.append(prompts)
    return found


def exam(corpus, target, number, length=320, seed=10**9 + 7):
    """Fixed unseen conversations: name -> Rows. `greedy`: the target's argmax; `drawn`: its words at temperature 1."""
    source = Source(corpus, Layout(number, length), seed=seed, spoken=0, voices=number)
    torch.manual_seed(seed)
    return {"greedy": source.fresh(target), "drawn": source.speak(target)}
