"""Muon for matrices, Adam for the rest, over flat buffers: no host decisions, so a step can be a CUDA graph.

All weights are views of one fp32 buffer and all gradients of another. Matrices are padded with zeros to a
few common shapes (which leaves the iteration unchanged) and orthogonalised in batches.
"""

import math

import torch

ALIGN = 64
SHAPES = ((128, 512), (320, 768), (512, 512), (320, 960))
TABLES = ("embed", "in_proj_a", "in_proj_b", "codebook", "kernel_projection")


def is_matrix(name, tensor):
    """True for what Muon updates: matrices that map activations, no tables and no gate projections."""
    return tensor.ndim == 2 and not any(part in name for part in TABLES)


class Store:
    """Weights and gradients as named views of flat buffers; Adam's part first, then Muon's."""

    def __init__(self, start, device):
        names = sorted(start, key=lambda n: is_matrix(n, start[n]))
        spans, at, self.adam_size = {}, 0, 0
        for name in names:
            if is_matrix(name, start[name]) and not self.adam_size:
                self.adam_size = at
            spans[name] = at
            at += -(-start[name].numel() // ALIGN) * ALIGN
        self.flat = torch.zeros(at, device=device)
        self.grad = torch.zeros(at, device=device)
        self.weights = {}
        for name in start:

            def view(buffer, a=spans[name], t=start[name]):
                return buffer[a : a + t.numel()].view(t.shape)

            view(self.flat).copy_(start[name])
            self.weights[name] = view(self.flat).detach().requires_grad_()
            self.weights[name].grad = view(self.grad)
        self.spans = spans


def parts_of(name, tensor):
    """Row ranges that Muon treats as matrices of their own: q, k and v of a fused projection."""
    rows = tensor.shape[0]
    if "in_proj_qkv" in name:
        return [(0, rows // 4), (rows // 4, rows // 2), (rows // 2, rows)]
    if "attn.qkv" in name:
        return [(i * rows // 3, (i + 1) * rows // 3) for i in range(3)]
    return [(0, rows)]


class Optimizer:
    """`step()` reads the scalars `scale` (of the learning rates), `momentum` and `bias` from the device."""

    def __init__(self, store, muon_rate=0.02, adam_rate=3e-3, decay=0.05, betas=(0.9, 0.98)):
        self.store, self.muon_rate, self.decay, self.betas = store, muon_rate, decay, betas
        device = store.flat.device
        self.scalars = torch.zeros(4, device=device)  # scale, momentum, 1 - b1^t, 1 - b2^t
        size = store.adam_size
        self.mean, self.square = torch.zeros(size, device=device), torch.zeros(size, device=device)
        self.rates = torch.full((size,), adam_rate * 0.7, device=device)
        self.groups, self.norm = {}, torch.zeros((), device=device)
        for name, tensor in store.weights.items():
            if "embed_tokens" in name:
                self.rates[store.spans[name] : store.spans[name] + tensor.numel()] = adam_rate
            if is_matrix(name, tensor):
                for a, b in parts_of(name, tensor):
                    self._add(tensor.data[a:b], tensor.grad[a:b])
        for group in self.groups.values():
            shape = (len(group["weights"]), *group["shape"])
            group["grads"], group["momentum"] = torch.zeros(shape, device=device), torch.zeros(shape, device=device)
            group["gain"] = torch.tensor(group["gain"], device=device)[:, None, None]

    def _add(self, weight, grad):
        tall = weight.shape[0] > weight.shape[1]
        short, long = sorted(weight.shape)
        shape = next(s for s in SHAPES if short <= s[0] and long <= s[1])
        group = self.groups.setdefault(shape, {"shape": shape, "weights": [], "sources": [], "corners": [], "gain": []})
        group["weights"].append(weight.T if tall else weight)
        group["sources"].append(grad.T if tall else grad)
        group["corners"].append((short, long))
        group["gain"].append(math.sqrt(max(1, weight.shape[0] / weight.shape[1])))

    def prepare(self, step, scale):
        """Set the scalars of step number `step` (from 0)."""
        b1, b2 = self.betas
        momentum = min(0.95, 0.85 + 0.1 * step / 300)
        self.scalars.copy_(
            torch.tensor([scale, momentum, 1 - b1 ** (step + 1), 1 - b2 ** (step + 1)]), non_blocking=True
        )

    @torch.no_grad()
    def step(self):
        scale, momentum, bias1, bias2 = self.scalars.unbind()
        self._adam(scale, bias1, bias2)
        for group in self.groups.values():
            self._muon(group, scale * self.muon_rate, momentum)

    def _adam(self, scale, bias1, bias2):
        size = self.store.adam_size
        g = self.store.grad[:size]
        self.norm.copy_(g.norm())
        g = torch.nan_to_num(g / self.norm.clamp(min=1.0), 0.0, 0.0, 0.0)
        b1, b2 = self.betas
        self.mean.lerp_(g, 1 - b1)
        self.square.lerp_(g * g, 1 - b2)
        update = (self.mean / bias1) / ((self.square / bias2).sqrt() + 1e-10)
        self.store.flat[:size].sub_(update * self.rates * scale)

    def _muon(self, group, rate, momentum):
        def corners(stack):
            return [stack[i, :a, :b] for i, (a, b) in enumerate(group["corners"])]

        torch._foreach_copy_(corners(group["grads"]), group["sources"])
        grads, running = group["grads"], group["momentum"]
        running.mul_(momentum).add_(grads * (1 - momentum))
        x = grads * (1 - momentum) + running * momentum
        x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-9)
        x = x.bfloat16() if x.is_cuda else x
        for _ in range(5):  # Newton-Schulz towards the nearest orthogonal matrix
            a = x @ x.mT
            b = torch.baddbmm(a, a, a, beta=-4.7750, alpha=2.0315)
            x = torch.baddbmm(x, b, x, beta=3.4445)
        torch._foreach_mul_(group["weights"], 1 - rate * self.decay)
        torch._foreach_add_(group["weights"], corners(x.float() * (group["gain"] * -rate)))

    def state(self):
        return {
            "flat": self.store.flat,
            "mean": self.mean,
            "square": self.square,
            "muon": {k: g["momentum"] for k, g in self.groups.items()},
        }

    def load(self, state):
        self.store.flat.copy_(state["flat"])
        self.mean.copy_(state["mean"])
        self.square.copy_(state["square"])
        for key, group in self.groups.items():
            group["momentum"].copy_(state["muon"][key])
