"""A trainer's forward of `qwen3_5` in plain torch, with the published tensor names.

Activations are flat, [rows * length, width], so the parts that torch.compile fuses see one shape whatever
the row length is. Attention and the delta rule stay outside the compiled parts. Products run in
`dtype` (bf16 on the GPU), the residual stream and the master weights in fp32.
"""

import itertools
import math

import torch
import torch.nn.functional as F

from .delta import delta_twin
from .painter import paint
from .tokenizer import ID, ROWS

TEXT = {
    "vocab_size": ROWS,
    "hidden_size": 320,
    "intermediate_size": 768,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "full_attention_interval": 4,
    "rms_norm_eps": 1e-6,
}
ROPE = {
    "rope_type": "default",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "mrope_section": [6, 5, 5],
    "mrope_interleaved": True,
}
TOWER = {
    "depth": 5,
    "hidden_size": 128,
    "num_heads": 4,
    "intermediate_size": 512,
    "out_hidden_size": 320,
    "num_position_embeddings": 256,
}
EPS = 1e-6
LAYER, BLOCK, VISUAL = "model.language_model.layers.", "model.visual.blocks.", "model.visual."
EMBED, FINAL = "model.language_model.embed_tokens.weight", "model.language_model.norm.weight"


def hf_config(text=TEXT, tower=TOWER, rope=ROPE):
    """The config.json of the published layout."""
    kinds = ["linear_attention", "full_attention"]
    types = [kinds[(i + 1) % text["full_attention_interval"] == 0] for i in range(text["num_hidden_layers"])]
    stop = {"eos_token_id": ID["<|im_end|>"], "pad_token_id": ID["<|endoftext|>"]}
    return dict(
        architectures=["Qwen3_5ForConditionalGeneration"],
        model_type="qwen3_5",
        dtype="bfloat16",
        tie_word_embeddings=True,
        image_token_id=ID["<|image_pad|>"],
        video_token_id=ID["<|video_pad|>"],
        vision_start_token_id=ID["<|vision_start|>"],
        vision_end_token_id=ID["<|vision_end|>"],
        **stop,
        text_config=dict(
            model_type="qwen3_5_text",
            dtype="bfloat16",
            **text,
            layer_types=types,
            hidden_act="silu",
            attention_bias=False,
            attn_output_gate=True,
            tie_word_embeddings=True,
            max_position_embeddings=4096,
            mamba_ssm_dtype="float32",
            rope_parameters=rope,
            **stop,
        ),
        vision_config=dict(
            model_type="qwen3_5",
            **tower,
            patch_size=16,
            temporal_patch_size=2,
            spatial_merge_size=2,
            in_channels=3,
            hidden_act="gelu_pytorch_tanh",
            deepstack_visual_indexes=[],
        ),
    )


def initial(text=TEXT, tower=TOWER, seed=0):
    """Start values, name -> f32 tensor. The decay starts as Mamba's does: long and short memories, not none."""
    g = torch.Generator().manual_seed(seed)
    p = {}

    def linear(name, out, inp, gain=0.7):
        p[name] = torch.randn(out, inp, generator=g) * (gain / math.sqrt(inp))

    d, wide, depth = text["hidden_size"], text["intermediate_size"], text["num_hidden_layers"]
    into = 0.7 / math.sqrt(2 * depth)  # outputs into the residual stream
    p[EMBED] = torch.randn(text["vocab_size"], d, generator=g) * 0.04
    for i in range(depth):
        at = f"{LAYER}{i}."
        p[at + "input_layernorm.weight"], p[at + "post_attention_layernorm.weight"] = torch.zeros(d), torch.zeros(d)
        if (i + 1) % text["full_attention_interval"]:
            nk, nv, dk, dv = (
                text[f"linear_{n}"] for n in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
            )
            channels, gdn = 2 * nk * dk + nv * dv, at + "linear_attn."
            linear(gdn + "in_proj_qkv.weight", channels, d)
            linear(gdn + "in_proj_z.weight", nv * dv, d)
            linear(gdn + "in_proj_b.weight", nv, d)
            linear(gdn + "in_proj_a.weight", nv, d, 0.2)
            taps = torch.rand(channels, 1, 4, generator=g) - 0.5
            taps[:, :, 3] += 0.5
            step = torch.exp(torch.rand(nv, generator=g) * math.log(100) + math.log(0.001))
            p[gdn + "conv1d.weight"] = taps
            p[gdn + "A_log"] = torch.log(torch.empty(nv).uniform_(1, 16, generator=g))
            p[gdn + "dt_bias"] = step + torch.log(-torch.expm1(-step))
            p[gdn + "norm.weight"] = torch.ones(dv)
            linear(gdn + "out_proj.weight", d, nv * dv, into)
        else:
            heads, kv, width, attn = (
                text["num_attention_heads"],
                text["num_key_value_heads"],
                text["head_dim"],
                at + "self_attn.",
            )
            linear(attn + "q_proj.weight", 2 * heads * width, d)
            linear(attn + "k_proj.weight", kv * width, d)
            linear(attn + "v_proj.weight", kv * width, d)
            linear(attn + "o_proj.weight", d, heads * width, into)
            p[attn + "q_norm.weight"], p[attn + "k_norm.weight"] = torch.zeros(width), torch.zeros(width)
        linear(at + "mlp.gate_proj.weight", wide, d)
        linear(at + "mlp.up_proj.weight", wide, d)
        linear(at + "mlp.down_proj.weight", d, wide, into)
    p[FINAL] = torch.zeros(d)
    _initial_tower(p, linear, tower, g)
    return p


def _initial_tower(p, linear, tower, g):
    d, wide, out = tower["hidden_size"], tower["intermediate_size"], tower["out_hidden_size"]
    into = 0.7 / math.sqrt(2 * tower["depth"])
    p[VISUAL + "patch_embed.proj.weight"] = torch.randn(d, 3, 2, 16, 16, generator=g) / math.sqrt(1536)
    p[VISUAL + "patch_embed.proj.bias"] = torch.zeros(d)
    p[VISUAL + "pos_embed.weight"] = torch.randn(tower["num_position_embeddings"], d, generator=g) * 0.1

    def biased(name, rows, columns, gain=0.7):
        linear(name + ".weight", rows, columns, gain)
        p[name + ".bias"] = torch.zeros(rows)

    def norm(name):
        p[name + ".weight"], p[name + ".bias"] = torch.ones(d), torch.zeros(d)

    for i in range(tower["depth"]):
        at = f"{BLOCK}{i}."
        norm(at + "norm1")
        norm(at + "norm2")
        biased(at + "attn.qkv", 3 * d, d)
        biased(at + "attn.proj", d, d, into)
        biased(at + "mlp.linear_fc1", wide, d)
        biased(at + "mlp.linear_fc2", d, wide, into)
    norm(VISUAL + "merger.norm")
    biased(VISUAL + "merger.linear_fc1", 4 * d, 4 * d)
    biased(VISUAL + "merger.linear_fc2", out, 4 * d, 0.4)


def rms1p(x, w, dtype):
    """Root-mean-square norm with weight 1 + w, computed in fp32."""
    h = x.float()
    return (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS) * (1 + w.float())).to(dtype)


def mlp(x, norm, gate, up, down, dtype):
    h = rms1p(x, norm, dtype)
    return x + F.linear(F.silu(F.linear(h, gate.to(dtype))) * F.linear(h, up.to(dtype)), down.to(dtype))


def gdn_in(x, keep, norm, qkv, z, b, a, conv, a_log, dt_bias, nk, nv, dk, dv, dtype):
    """x [T, D], keep [T, 3] (1 where the row 1, 2, 3 back is of the same conversation) -> q, k, v, z, g, beta."""
    h = rms1p(x, norm, dtype)
    mixed, taps = F.linear(h, qkv.to(dtype)).float(), conv.to(dtype).float()
    c = mixed * taps[:, 0, 3]
    for j in (1, 2, 3):
        c = c + F.pad(mixed, (0, 0, j, 0))[:-j] * keep[:, j - 1 : j] * taps[:, 0, 3 - j]
    q, k, v = F.silu(c).split([nk * dk, nk * dk, nv * dv], -1)
    q, k = q.reshape(-1, nk, dk), k.reshape(-1, nk, dk)
    q = q * torch.rsqrt(q.pow(2).sum(-1, keepdim=True) + 1e-6) * dk**-0.5
    k = k * torch.rsqrt(k.pow(2).sum(-1, keepdim=True) + 1e-6)
    beta = torch.sigmoid(F.linear(h, b.to(dtype)).float())
    g = -a_log.float().exp() * F.softplus(F.linear(h, a.to(dtype)).float() + dt_bias.float())
    return q.to(dtype), k.to(dtype), v.reshape(-1, nv, dv).to(dtype), F.linear(h, z.to(dtype)), g, beta


def gdn_out(x, o, z, head_norm, out, norm, gate, up, down, dtype):
    """Gated norm of the heads o [T, nv, dv], projection, then the MLP."""
    h = o.float()
    h = (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS)).to(dtype)
    h = (head_norm.to(dtype) * h).float() * F.silu(z.reshape(o.shape).float())
    x = x + F.linear(h.to(dtype).flatten(1), out.to(dtype))
    return mlp(x, norm, gate, up, down, dtype)


def rotate(x, cos, sin):
    """Rotary embedding of the first cos.shape[-1] channels; x [T, heads, d], cos and sin [T, 1, r]."""
    r = cos.shape[-1]
    a, rest = x[..., :r], x[..., r:]
    return torch.cat([a * cos + torch.cat([-a[..., r // 2 :], a[..., : r // 2]], -1) * sin, rest], -1)


def attention_in(x, cos, sin, norm, q, k, v, q_norm, k_norm, heads, kv, width, dtype):
    h = rms1p(x, norm, dtype)
    query, gate = F.linear(h, q.to(dtype)).view(-1, heads, 2 * width).chunk(2, -1)
    key, value = F.linear(h, k.to(dtype)).view(-1, kv, width), F.linear(h, v.to(dtype)).view(-1, kv, width)
    query, key = rotate(rms1p(query, q_norm, dtype), cos, sin), rotate(rms1p(key, k_norm, dtype), cos, sin)
    share = heads // kv
    return query, key.repeat_interleave(share, 1), value.repeat_interleave(share, 1), gate.flatten(1)


def attention_out(x, o, gate, out, norm, mlp_gate, up, down, dtype):
    x = x + F.linear(o.flatten(1) * torch.sigmoid(gate), out.to(dtype))
    return mlp(x, norm, mlp_gate, up, down, dtype)


def layer_norm(x, w, b, dtype):
    return F.layer_norm(x.float(), (x.shape[-1],), w.float(), b.float(), EPS).to(dtype)


def tower_embed(pixels, w, b, table, row, column, rows, columns):
    """pixels [P, 768]; the two temporal halves of a still picture are equal, so their weights add."""
    x = F.linear(pixels, w.sum(2).flatten(1).to(pixels.dtype), b.to(pixels.dtype)).float()
    side = math.isqrt(table.shape[0])
    r, c = (at.float() * ((side - 1) / (n.float() - 1)) for at, n in ((row, rows), (column, columns)))
    top, left = r.floor(), c.floor()
    fr, fc = (r - top)[:, None], (c - left)[:, None]
    top, left = top.long(), left.long()
    bottom, right = (top + 1).clamp(max=side - 1), (left + 1).clamp(max=side - 1)
    mix = table[top * side + left] * (1 - fr) * (1 - fc) + table[top * side + right] * (1 - fr) * fc
    return x + mix + table[bottom * side + left] * fr * (1 - fc) + table[bottom * side + right] * fr * fc


def tower_in(x, cos, sin, norm_w, norm_b, w, b, heads, dtype):
    q, k, v = (
        F.linear(layer_norm(x, norm_w, norm_b, dtype), w.to(dtype), b.to(dtype))
        .view(x.shape[0], 3, heads, -1)
        .unbind(1)
    )
    return rotate(q.float(), cos, sin).to(dtype), rotate(k.float(), cos, sin).to(dtype), v.contiguous()


def tower_out(x, o, w, b, norm_w, norm_b, w1, b1, w2, b2, dtype):
    x = x + F.linear(o.flatten(1), w.to(dtype), b.to(dtype))
    h = F.gelu(F.linear(layer_norm(x, norm_w, norm_b, dtype), w1.to(dtype), b1.to(dtype)), approximate="tanh")
    return x + F.linear(h, w2.to(dtype), b2.to(dtype))


def tower_merge(x, norm_w, norm_b, w1, b1, w2, b2, dtype):
    h = layer_norm(x, norm_w, norm_b, dtype).reshape(x.shape[0] // 4, -1)
    return F.linear(F.gelu(F.linear(h, w1.to(dtype), b1.to(dtype))), w2.to(dtype), b2.to(dtype))


def predict(x, norm, embed, target, dtype):
    """Rows that predict, x [M, D] -> loss of each target [M] f32, whether it is the argmax [M] bool."""
    logits = F.linear(rms1p(x, norm, dtype), embed.to(dtype)).float()
    return F.cross_entropy(logits, target, reduction="none"), logits.argmax(-1) == target


def segments_twin(q, k, v, ends, longest):
    """Attention within each segment of a flat [P, heads, d]; `ends` are cumulative, from 0."""
    parts, marks = [], ends.tolist()
    for a, b in itertools.pairwise(marks):
        if b > a:
            q1, k1, v1 = (t[a:b].transpose(0, 1)[None] for t in (q, k, v))
            parts.append(F.scaled_dot_product_attention(q1, k1, v1)[0].transpose(0, 1))
    return torch.cat(parts)


COMPILED = (paint, gdn_in, gdn_out, attention_in, attention_out, tower_embed, tower_in, tower_out, tower_merge, predict)


class Net:
    """The forward over a dict of weights; `kernels` and `compile_` choose how it runs."""

    def __init__(
        self,
        weights,
        text=TEXT,
        tower=TOWER,
        dtype=torch.bfloat16,
        delta=delta_twin,
        segments=segments_twin,
        compile_=lambda f: f,
    ):
        self.weights, self.text_sizes, self.tower_sizes, self.dtype = weights, text, tower, dtype
        self.delta, self.segments = delta, segments
        self.f = {f.__name__: compile_(f) for f in COMPILED}
        device = weights[EMBED].device
        half = int(text["head_dim"] * ROPE["partial_rotary_factor"]) // 2
        self.frequency = (ROPE["rope_theta"] ** (-torch.arange(half).float() / half)).to(device)
        axis = torch.zeros(half, dtype=torch.long)
        for a in (1, 2):
            axis[a : 3 * ROPE["mrope_section"][a] : 3] = a
        self.axis = axis.to(device)
        quarter = tower["hidden_size"] // tower["num_heads"] // 4
        self.tower_frequency = (10000.0 ** (-torch.arange(quarter).float() / quarter)).to(device)

    def part(self, at, *names):
        return [self.weights[at + name] for name in names]

    def see(self, pixels, row, column, rows, columns, ends, longest):
        """Patches [P, 768] -> features [P / 4, D]."""
        f, dtype = self.f, self.dtype
        x = f["tower_embed"](
            pixels.to(dtype),
            *self.part(VISUAL, "patch_embed.proj.weight", "patch_embed.proj.bias", "pos_embed.weight"),
            row,
            column,
            rows,
            columns,
        )
        angle = torch.cat(
            [row.float()[:, None] * self.tower_frequency, column.float()[:, None] * self.tower_frequency], 1
        )
        angle = torch.cat([angle, angle], 1)[:, None]
        cos, sin = angle.cos(), angle.sin()
        for i in range(self.tower_sizes["depth"]):
            at = f"{BLOCK}{i}."
            q, k, v = f["tower_in"](
                x,
                cos,
                sin,
                *self.part(at, "norm1.weight", "norm1.bias", "attn.qkv.weight", "attn.qkv.bias"),
                self.tower_sizes["num_heads"],
                dtype,
            )
            o = self.segments(q, k, v, ends, longest)
            x = f["tower_out"](
                x,
                o,
                *self.part(
                    at,
                    "attn.proj.weight",
                    "attn.proj.bias",
                    "norm2.weight",
                    "norm2.bias",
                    "mlp.linear_fc1.weight",
                    "mlp.linear_fc1.bias",
                    "mlp.linear_fc2.weight",
                    "mlp.linear_fc2.bias",
                ),
                dtype,
            )
        return f["tower_merge"](
            x,
            *self.part(
                VISUAL + "merger.",
                "norm.weight",
                "norm.bias",
                "linear_fc1.weight",
                "linear_fc1.bias",
                "linear_fc2.weight",
                "linear_fc2.bias",
            ),
            dtype,
        )

    def read(self, ids, positions, features=None, slots=None, taps=None):
        """ids [B, L], positions [3, B, L]; features replace the flat rows `slots` -> hidden [B * L, D] f32.

        `taps`: a dict by layer; the rows after each of its layers become its values.
        """
        sizes, f, dtype = self.text_sizes, self.f, self.dtype
        batch, length = ids.shape
        x = self.weights[EMBED].index_select(0, ids.reshape(-1).long()).float()
        if features is not None:
            x = torch.cat([x, x.new_zeros(1, x.shape[1])]).index_copy(0, slots.long(), features.float())[:-1]
        angle = positions.float()[self.axis].permute(1, 2, 0).reshape(batch * length, -1) * self.frequency
        angle = torch.cat([angle, angle], -1)[:, None]
        cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
        at_least = torch.arange(length, device=ids.device)[:, None] >= torch.arange(1, 4, device=ids.device)
        keep = at_least.float().repeat(batch, 1)
        heads, kv, width = sizes["num_attention_heads"], sizes["num_key_value_heads"], sizes["head_dim"]
        gdn_sizes = [
            sizes[f"linear_{n}"] for n in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
        ]

        def rows(a):
            return a.view(batch, length, *a.shape[1:])

        for i in range(sizes["num_hidden_layers"]):
            at = f"{LAYER}{i}."
            tail = self.part(
                at,
                "post_attention_layernorm.weight",
                "mlp.gate_proj.weight",
                "mlp.up_proj.weight",
                "mlp.down_proj.weight",
            )
            if (i + 1) % sizes["full_attention_interval"]:
                q, k, v, z, g, beta = f["gdn_in"](
                    x,
                    keep,
                    *self.part(
                        at,
                        "input_layernorm.weight",
                        *(
                            "linear_attn." + n
                            for n in (
                                "in_proj_qkv.weight",
                                "in_proj_z.weight",
                                "in_proj_b.weight",
                                "in_proj_a.weight",
                                "conv1d.weight",
                                "A_log",
                                "dt_bias",
                            )
                        ),
                    ),
                    *gdn_sizes,
                    dtype,
                )
                o = self.delta(*map(rows, (q, k, v, g, beta))).reshape(batch * length, gdn_sizes[1], -1)
                x = f["gdn_out"](
                    x, o, z, *self.part(at, "linear_attn.norm.weight", "linear_attn.out_proj.weight"), *tail, dtype
                )
            else:
                q, k, v, gate = f["attention_in"](
                    x,
                    cos,
                    sin,
                    *self.part(
                        at,
                        "input_layernorm.weight",
                        *(
                            "self_attn." + n
                            for n in (
                                "q_proj.weight",
                                "k_proj.weight",
                                "v_proj.weight",
                                "q_norm.weight",
                                "k_norm.weight",
                            )
                        ),
                    ),
                    heads,
                    kv,
                    width,
                    dtype,
                )
                o = F.scaled_dot_product_attention(*(rows(a).transpose(1, 2) for a in (q, k, v)), is_causal=True)
                o = o.transpose(1, 2).reshape(batch * length, heads, width)
                x = f["attention_out"](x, o, gate, *self.part(at, "self_attn.o_proj.weight"), *tail, dtype)
            if taps is not None and i in taps:
                taps[i] = x
        return x

    def judge(self, batch, longest, pixels=None):
        """A batch (conversation.Layout) -> loss of each target [M], right [M]; `pixels` replace the painter's."""
        if pixels is None:
            pixels = self.f["paint"](*(batch[n] for n in ("shapes", "grounds", "picture", "patch_row", "patch_column")))
        features = self.see(
            pixels, *(batch[n] for n in ("patch_row", "patch_column", "grid_rows", "grid_columns", "segment")), longest
        )
        x = self.read(batch["ids"], batch["positions"], features, batch["slot"])
        x = x.index_select(0, batch["source"])
        return self.f["predict"](x, *self.part("", FINAL, EMBED), batch["target"].long(), self.dtype)
