"""The drafter as a trainer sees it: DFlash2 in plain torch, with the published tensor names.

From the target's tapped rows one context feature a row: ctx = norm(fc taps). A block holds the pending token (the
anchor, at row a) and `block - 1` masks, embedded by the target's table; its rows see the context rows before a and
the whole block. The anchor's own row is not in the context: the target has not read it yet when a draft is due.

    layer:     y = norm(x); u = conv0(y); x += conv1(attention(u, ctx)); y = norm(x); x += conv1(mlp(conv0(y)))
    conv_s(u)  [t, c] = sum over o of (base[s, o, c] + (P y)[t, s, o, c // group]) u[t - o, c], nothing before the block
    selector   score(b after a) = logit(b) + <A[a] * (W h), B[b]> over the top candidates of a place

Products run in `dtype` (bf16 on CUDA), norms, the residual stream and the master weights in fp32.
"""

import math

import torch
import torch.nn.functional as F

from ..net import EPS, TEXT, rotate
from ..tokenizer import ID, ROWS

CONFIG = {
    "architectures": ["DFlash2DraftModel"],
    "model_type": "qwen3",
    "dtype": "bfloat16",
    "vocab_size": ROWS,
    "hidden_size": TEXT["hidden_size"],
    "intermediate_size": TEXT["intermediate_size"],
    "num_hidden_layers": 2,
    "num_attention_heads": TEXT["num_attention_heads"],
    "num_key_value_heads": TEXT["num_key_value_heads"],
    "head_dim": TEXT["head_dim"],
    "hidden_act": "silu",
    "rms_norm_eps": EPS,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "max_position_embeddings": 4096,
    "attention_bias": False,
    "is_causal": False,
    "layer_types": ["full_attention", "full_attention"],
    "use_sliding_window": False,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "num_target_layers": TEXT["num_hidden_layers"],
    "block_size": 8,
    "dflash_config": {
        "block_size": 8,
        "target_layer_ids": [1, 3, 5],
        "mask_token_id": ID["<|mask|>"],
        "conv_kernel_size": 2,
        "conv_group_size": 16,
        "selector_rank": 128,
        "selector_top_k": 16,
        "input_embedding_scale": 0.125,
    },
}
"""config.json of the published layout, and the sizes of everything here."""
SELECTOR = "candidate_selector."


def initial(final_scale, config=CONFIG, seed=0):
    """Start values, name -> f32 tensor. Convolutions start as the identity, the selector as no change at all.

    `final_scale` f32 [D]: the target's, the start of the drafter's own final norm (both feed the same head).
    """
    g, sizes = torch.Generator().manual_seed(seed), config["dflash_config"]
    width, wide, depth = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
    heads, kv, head = (config[n] for n in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    into = 0.7 / math.sqrt(2 * depth)
    p = {}

    def linear(name, out, inp, gain=0.7):
        p[name + ".weight"] = torch.randn(out, inp, generator=g) * (gain / math.sqrt(inp))

    linear("fc", width, width * len(sizes["target_layer_ids"]))
    p["hidden_norm.weight"], p["norm.weight"] = torch.ones(width), final_scale.detach().cpu().float().clone()
    for i in range(depth):
        at = f"layers.{i}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            p[f"{at}{norm}.weight"] = torch.ones(width)
        linear(at + "self_attn.q_proj", heads * head, width)
        linear(at + "self_attn.k_proj", kv * head, width)
        linear(at + "self_attn.v_proj", kv * head, width)
        linear(at + "self_attn.o_proj", width, heads * head, into)
        p[at + "self_attn.q_norm.weight"], p[at + "self_attn.k_norm.weight"] = torch.ones(head), torch.ones(head)
        linear(at + "mlp.gate_proj", wide, width)
        linear(at + "mlp.up_proj", wide, width)
        linear(at + "mlp.down_proj", width, wide, into)
        for conv in ("attention_conv", "mlp_conv"):
            kernel = sizes["conv_kernel_size"]
            base = torch.zeros(2, kernel, width)
            base[:, 0] = 1
            p[f"{at}{conv}.base_kernel"] = base
            p[f"{at}{conv}.kernel_projection.weight"] = torch.zeros(
                2 * kernel * width // sizes["conv_group_size"], width
            )
    rank = sizes["selector_rank"]
    linear(SELECTOR + "hidden_projection", rank, width)
    p[SELECTOR + "predecessor_codebook"] = torch.randn(config["vocab_size"], rank, generator=g) * 0.3
    p[SELECTOR + "successor_codebook"] = torch.zeros(config["vocab_size"], rank)
    return p


def norm(x, weight, dtype):
    h = x.float()
    return (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS) * weight.float()).to(dtype)


class Drafter:
    """The forward over a dict of weights. `embedding` f32 [V, D]: the target's table, which embeds and predicts."""

    def __init__(self, weights, embedding, config=CONFIG, dtype=torch.float32):
        self.weights, self.embedding, self.config, self.dtype = weights, embedding, config, dtype
        self.sizes, self.block = config["dflash_config"], config["dflash_config"]["block_size"]
        half = config["head_dim"] // 2
        frequency = config["rope_theta"] ** (-torch.arange(half).float() / half)
        self.frequency = torch.cat([frequency, frequency]).to(embedding.device)

    def linear(self, x, name):
        return F.linear(x, self.weights[name + ".weight"].to(self.dtype))

    def angles(self, places):
        """Rows' absolute places [...] -> cos, sin [..., 1, head_dim]."""
        angle = (places[..., None].float() * self.frequency)[..., None, :]
        return angle.cos().to(self.dtype), angle.sin().to(self.dtype)

    def hidden(self, rows, at):
        """Blocks at anchors `at` int64 [N, A] over `rows` (data.Rows) -> [N, A, block, D] before the final norm."""
        ctx = norm(self.linear(rows.taps.to(self.dtype), "fc"), self.weights["hidden_norm.weight"], self.dtype)
        ids = F.pad(rows.ids.gather(1, at)[..., None], (0, self.block - 1), value=self.sizes["mask_token_id"])
        x = self.embedding[ids] * self.sizes["input_embedding_scale"]
        spans = torch.arange(ctx.shape[1], device=at.device), at[..., None] + torch.arange(self.block, device=at.device)
        angles = [self.angles(places) for places in spans]
        unseen = spans[0] >= at[..., None]  # [N, A, L]: the anchor's own row and what lies behind it
        for i in range(self.config["num_hidden_layers"]):
            name = f"layers.{i}."
            y = norm(x, self.weights[name + "input_layernorm.weight"], self.dtype)
            kernels = self.kernels(name + "attention_conv", y)
            o = self.attend(name + "self_attn.", self.convolve(kernels, 0, y), ctx, angles, unseen)
            x = x + self.convolve(kernels, 1, o)
            y = norm(x, self.weights[name + "post_attention_layernorm.weight"], self.dtype)
            kernels = self.kernels(name + "mlp_conv", y)
            u = self.convolve(kernels, 0, y)
            u = F.silu(self.linear(u, name + "mlp.gate_proj")) * self.linear(u, name + "mlp.up_proj")
            x = x + self.convolve(kernels, 1, self.linear(u, name + "mlp.down_proj"))
        return x

    def kernels(self, name, y):
        """Each row's own kernels of both sides [..., 2, kernel, D]."""
        kernel, group = self.sizes["conv_kernel_size"], self.sizes["conv_group_size"]
        dynamic = self.linear(y, name + ".kernel_projection").float()
        dynamic = dynamic.view(*y.shape[:-1], 2, kernel, y.shape[-1] // group).repeat_interleave(group, -1)
        return self.weights[name + ".base_kernel"] + dynamic

    def convolve(self, kernels, side, u):
        """The rows [..., block, D] mixed with those before them in the block."""
        out = kernels[..., side, 0, :] * u
        for back in range(1, kernels.shape[-2]):
            out = out + kernels[..., side, back, :] * F.pad(u, (0, 0, back, 0))[..., :-back, :]
        return out.to(u.dtype)

    def attend(self, name, u, ctx, angles, unseen):
        """u [N, A, block, D] over ctx [N, L, D] and its own block -> [N, A, block, D]."""
        heads, kv, width = (self.config[n] for n in ("num_attention_heads", "num_key_value_heads", "head_dim"))
        many, number, block, share = *u.shape[:3], heads // kv

        def project(x, part, count, place):
            y = self.linear(x, f"{name}{part}_proj").view(*x.shape[:-1], count, width)
            return y if part == "v" else rotate(norm(y, self.weights[f"{name}{part}_norm.weight"], self.dtype), *place)

        q = project(u, "q", heads, angles[1]).view(many, number, block, kv, share, width) * width**-0.5
        k, v = (project(u, part, kv, angles[1]) for part in "kv")
        past_k, past_v = (project(ctx, part, kv, angles[0]) for part in "kv")
        past = torch.einsum("nabksd,nlkd->nkabsl", q, past_k).float()
        past = past.masked_fill(unseen[:, None, :, None, None], -math.inf)
        own = torch.einsum("nabksd,nackd->nkabsc", q, k).float()
        share_of = torch.cat([past, own], -1).softmax(-1).to(self.dtype)
        past, own = share_of.split([ctx.shape[1], block], -1)
        o = torch.einsum("nkabsl,nlkd->nabksd", past, past_v) + torch.einsum("nkabsc,nackd->nabksd", own, v)
        return self.linear(o.reshape(many, number, block, heads * width), name + "o_proj")

    def predict(self, x):
        """Rows behind the anchor [..., D] -> (h, logits f32 [..., V])."""
        h = norm(x, self.weights["norm.weight"], self.dtype)
        return h, F.linear(h, self.embedding.to(self.dtype)).float()

    def rescore(self, h, logits, candidates, before):
        """Scores [..., K] f32 of candidates behind the tokens `before` [...]; h [..., D], logits [..., K]."""
        into, out = (self.weights[f"{SELECTOR}{n}_codebook"].to(self.dtype) for n in ("predecessor", "successor"))
        key = F.embedding(before, into) * self.linear(h, SELECTOR + "hidden_projection")
        return logits + (F.embedding(candidates, out) * key[..., None, :]).sum(-1, dtype=torch.float32)

    def loss(self, rows, at, real, labels, valid):
        """Blocks of `data.choose` and `data.blocks` -> (loss to minimise, measures f32 [3]).

        Cross-entropy of the target's token at each place, and of the same among the top candidates behind the token
        before it. A place weighs what it does for the expected length of the accepted draft (D-PACE): the sum over
        the drafts that need it of the product of the chances on their way, each chance moved half way to 1.
        Measures: the losses of both, and the share of first places where the likeliest token is right.
        """
        h, logits = self.predict(self.hidden(rows, at)[:, :, 1:])
        valid = valid & real[..., None]
        plain = F.cross_entropy(logits.flatten(0, 2), labels.flatten(), reduction="none").view(labels.shape)
        with torch.no_grad():
            reach = (torch.exp(-plain) * 0.5 + 0.5).cumprod(-1) * valid
            weight = reach.flip(-1).cumsum(-1).flip(-1) * valid
            weight = weight / weight.sum().clamp(min=1)
            candidates = logits.topk(self.sizes["selector_top_k"], -1).indices
            here = candidates == labels[..., None]
            found = here.any(-1)
        before = torch.cat([rows.ids.gather(1, at)[..., None], labels[..., :-1]], -1)
        scores = self.rescore(h, logits.gather(-1, candidates), candidates, before)
        chosen = F.cross_entropy(scores.flatten(0, 2), here.int().argmax(-1).flatten(), reduction="none")
        chosen = (chosen.view(labels.shape) * weight * found).sum()
        plain = (plain * weight).sum()
        first = valid[..., 0]
        right = (candidates[..., 0, 0] == labels[..., 0])[first].float().mean()
        return plain + chosen, torch.stack([plain.detach(), chosen.detach(), right])

    @torch.no_grad()
    def draft(self, rows, at):
        """The chain that a greedy walk of the selector gives behind each anchor, int64 [N, A, block - 1]."""
        h, logits = self.predict(self.hidden(rows, at)[:, :, 1:])
        top = logits.topk(self.sizes["selector_top_k"], -1)
        before, chain = rows.ids.gather(1, at), []
        for k in range(self.block - 1):
            candidates = top.indices[:, :, k]
            scores = self.rescore(h[:, :, k], top.values[:, :, k], candidates, before)
            before = candidates.gather(-1, scores.argmax(-1, keepdim=True))[..., 0]
            chain.append(before)
        return torch.stack(chain, -1)
