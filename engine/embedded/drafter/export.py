"""The drafter's folder in the published layout: the averaged weights in bf16, their config, and a card.

    python -m tfmagic.engine.embedded.drafter.export out              # the newest state in `out`
    python -m tfmagic.engine.embedded.drafter.evaluate --card         # then measure it and fill in the scores
"""

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from . import DRAFTER
from .net import CONFIG

CARD = """\
---
license: apache-2.0
language: en
tags: [dflash2, draft-model, tiny, from-scratch]
---

# tfmagic-embedded-drafter

The block drafter of the embedded model in the folder above: {parameters:.2f} million parameters, {size:.1f} MB. From
hidden rows of the model's layers {taps} it guesses the next {places} tokens in one pass; the model verifies them
all at once. It changes no reply, only how many rounds a reply takes.

| part | values |
|---|---|
| layout | `DFlash2DraftModel`, bf16 safetensors; made for these very weights, of no use for others |
| body | {layers} layers of width 320: 4 heads of 64, 2 of keys; MLP 768 |
| block | {block} rows, which see each other and the context before them |
| context | `fc` 960 to 320 over the tapped rows, one feature a row |
| around attention and MLP | grouped dynamic convolutions, kernel 2, groups of 16 |
| selector | codebooks of rank {rank} for 4,096 ids, top 16 of each place |
| borrowed | embedding and head of the model; the mask is row 4079; embedded rows times {scale} |

## Scores

Not measured.

## How it was made

`engine/embedded/drafter/train.py`, from random weights, on the model above and nothing else: {steps:,} steps of {rows}
conversations with up to {anchors} drafts each, {minutes:.0f} minutes on {device}. The conversations come from the
generator of the model's own recipe. The model read each once: its hidden rows are the context, its own tokens the
labels. {spoken:.0%} of them it spoke again at temperature 1, so that stories are in its own words. A conversation was
used in about {reuse} steps, each time with other drafts. Loss: cross-entropy of each place and of the selector in the
top 16, weighted by what a place does for the expected length (D-PACE, smoothed by one half). Muon for matrices, Adam
for the rest; what ships is the running average of the weights. Nothing was selected on the scores.

## Limits

- It drafts for what the model was trained on: English, its own tasks, conversations of up to about {length} tokens.
  Elsewhere it is right less often, and the engine stops asking it.
- Unfamiliar words are copied piece by piece: where a text repeats, the engine's copied continuation does better.
- A short answer ends before a block does: an answer of seven tokens is one round at best, and counts as such.

## Licence

Apache-2.0, as the rest of tfmagic.
"""


def averaged(out):
    """`OUT/state.pt` -> (name -> f32 tensor of the running average, the whole state)."""
    box = torch.load(Path(out) / "state.pt", map_location="cpu", weights_only=True)
    weights = {}
    for name, (at, shape) in box["spans"].items():
        weights[name] = box["average"][at : at + torch.Size(shape).numel()].view(shape)
    return weights, box


def save(folder, weights, config=CONFIG):
    """Write weights (as bf16) and config into `folder`."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: t.detach().to(torch.bfloat16).cpu().contiguous().clone() for name, t in weights.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # safetensors writes for the owner alone
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def write_card(folder, weights, box, config=CONFIG):
    """The README.md of a drafter; its scores are `evaluate`'s to fill in."""
    own, how = config["dflash_config"], box["how"]
    size = (Path(folder) / "model.safetensors").stat().st_size / 1e6
    text = CARD.format(
        parameters=sum(t.numel() for t in weights.values()) / 1e6,
        size=size,
        taps=", ".join(map(str, own["target_layer_ids"])),
        places=own["block_size"] - 1,
        block=own["block_size"],
        layers=config["num_hidden_layers"],
        rank=own["selector_rank"],
        scale=own["input_embedding_scale"],
        steps=box["step"],
        minutes=box["seconds"] / 60,
        **how,
    )
    (Path(folder) / "README.md").write_text(text)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the folder that training wrote")
    parser.add_argument("--folder", type=Path, default=DRAFTER)
    args = parser.parse_args()
    weights, box = averaged(args.out)
    save(args.folder, weights)
    write_card(args.folder, weights, box)
    print(f"step {box['step']}, {box['seconds']:.0f} s -> {args.folder}")


if __name__ == "__main__":
    main()
