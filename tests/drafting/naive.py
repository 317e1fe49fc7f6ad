"""DFlash and DFlash2 as their formulas read, one number after another in float64: what the batched pass is held to."""

from __future__ import annotations

import math

import torch


class Naive:
    def __init__(self, config: dict, tensors: dict, embedding: torch.Tensor, head: torch.Tensor):
        self.c, self.own = config, {**config, **config["dflash_config"]}
        self.t = {name: x.double() for name, x in tensors.items()}
        self.E, self.H = embedding.double(), head.double()

    def hidden(self, tapped: dict[int, torch.Tensor], anchor: int, position: int) -> list[torch.Tensor]:
        """The block's rows behind the last norm. tapped: row → its taps, of every row that is known."""
        c, t, own = self.c, self.t, self.own
        scale = own.get("input_embedding_scale", 1.0)
        ids = [anchor] + [own["mask_token_id"]] * (own["block_size"] - 1)
        context = {row: self.norm(t["fc.weight"] @ x.double(), "hidden_norm.weight") for row, x in tapped.items()}
        x = [scale * self.E[id] for id in ids]
        for i in range(c["num_hidden_layers"]):
            p = f"layers.{i}."
            y = [self.norm(row, p + "input_layernorm.weight") for row in x]
            a = self.convolve(p + "attention_conv.", 0, y, y)
            o = self.attention(i, a, context, position)
            o = self.convolve(p + "attention_conv.", 1, y, o)
            x = [row + other for row, other in zip(x, o)]
            y = [self.norm(row, p + "post_attention_layernorm.weight") for row in x]
            m = [self.mlp(p + "mlp.", row) for row in self.convolve(p + "mlp_conv.", 0, y, y)]
            x = [row + other for row, other in zip(x, self.convolve(p + "mlp_conv.", 1, y, m))]
        return [self.norm(row, "norm.weight") for row in x]

    def norm(self, x: torch.Tensor, weight: str) -> torch.Tensor:
        return x / math.sqrt(sum(float(v) ** 2 for v in x) / len(x) + self.c["rms_norm_eps"]) * self.t[weight]

    def convolve(self, p: str, side: int, y: list, u: list) -> list:
        if p + "base_kernel" not in self.t:
            return u
        base, K, group = self.t[p + "base_kernel"], self.own["conv_kernel_size"], self.own["conv_group_size"]
        groups, out = len(y[0]) // group, []
        for t in range(len(u)):
            dynamic = (self.t[p + "kernel_projection.weight"] @ y[t]).view(2, K, groups)
            row = torch.zeros_like(u[t])
            for o in range(K):
                for ch in range(len(row)):
                    if t - o >= 0:
                        row[ch] += (base[side, o, ch] + dynamic[side, o, ch // group]) * u[t - o][ch]
            out.append(row)
        return out

    def rotated(self, x: torch.Tensor, place: int) -> torch.Tensor:
        half = len(x) // 2
        out = torch.empty_like(x)
        for j in range(half):
            angle = place * self.c["rope_theta"] ** (-2 * j / len(x))
            out[j] = x[j] * math.cos(angle) - x[j + half] * math.sin(angle)
            out[j + half] = x[j + half] * math.cos(angle) + x[j] * math.sin(angle)
        return out

    def attention(self, i: int, a: list, context: dict, position: int) -> list:
        c, p, d = self.c, f"layers.{i}.self_attn.", self.c["head_dim"]
        slides = c["layer_types"][i] == "sliding_attention"
        causal = slides if c.get("is_causal") is None else c["is_causal"]
        rows = {**context, **{position + j: row for j, row in enumerate(a)}}
        shared, out = c["num_attention_heads"] // c["num_key_value_heads"], []
        for j, row in enumerate(a):
            heads = []
            for h in range(c["num_attention_heads"]):
                q = self.norm(self.part(p + "q_proj.weight", h) @ row, p + "q_norm.weight")
                q, scores, values = self.rotated(q, position + j), [], []
                for place, key in rows.items():
                    away = position + j - place
                    if (causal and away < 0) or (slides and abs(away) >= c["sliding_window"]):
                        continue
                    k = self.norm(self.part(p + "k_proj.weight", h // shared) @ key, p + "k_norm.weight")
                    scores.append(float(q @ self.rotated(k, place)) / math.sqrt(d))
                    values.append(self.part(p + "v_proj.weight", h // shared) @ key)
                chances = torch.tensor(scores, dtype=torch.float64).softmax(0)
                heads.append(sum(chance * value for chance, value in zip(chances, values)))
            out.append(self.t[p + "o_proj.weight"] @ torch.cat(heads))
        return out

    def part(self, name: str, head: int) -> torch.Tensor:
        d = self.c["head_dim"]
        return self.t[name][head * d : (head + 1) * d]

    def mlp(self, p: str, row: torch.Tensor) -> torch.Tensor:
        gate, up = self.t[p + "gate_proj.weight"] @ row, self.t[p + "up_proj.weight"] @ row
        return self.t[p + "down_proj.weight"] @ (gate / (1 + torch.exp(-gate)) * up)

    def logits(self, h: torch.Tensor) -> torch.Tensor:
        logits = self.H[: self.c["vocab_size"]] @ h * self.own.get("output_multiplier", 1.0)
        cap = self.own.get("final_logit_softcapping")
        return cap * torch.tanh(logits / cap) if cap else logits

    def edge(self, before: int, candidate: int, h: torch.Tensor) -> float:
        """What the selector adds to `candidate` behind `before`, at the place of the row h."""
        p = "candidate_selector."
        if p + "predecessor_codebook" not in self.t or before >= self.c["vocab_size"]:
            return 0.0
        projected = self.t[p + "hidden_projection.weight"] @ h
        pair = self.t[p + "predecessor_codebook"][before] * self.t[p + "successor_codebook"][candidate]
        return float((pair * projected).sum())
