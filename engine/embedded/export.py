"""The model folder in the Hugging Face layout: weights, config, template and processor files."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from .net import hf_config
from .scenes import LEAST_TOKENS, MOST_TOKENS, TILE
from .tokenizer import ID

SHARD = 15_000_000  # bytes: each file stays under 16 MB
TEMPLATE = """\
{%- for message in messages -%}
    {{- '<|im_start|>' + message.role + '\\n' -}}
    {%- if message.content is string -%}
        {{- message.content -}}
    {%- else -%}
        {%- for part in message.content -%}
            {%- if part.type == 'image' or 'image' in part or 'image_url' in part -%}
                {{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
            {%- elif part.type == 'video' or 'video' in part -%}
                {{- raise_exception('This model sees still pictures only.') -}}
            {%- elif 'text' in part -%}
                {{- part.text -}}
            {%- endif -%}
        {%- endfor -%}
    {%- endif -%}
    {{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""


def small_files():
    """name -> content of every file beside weights, tokenizer and card."""
    stop = [ID["<|im_end|>"], ID["<|endoftext|>"]]
    return {
        "config.json": hf_config(),
        "generation_config.json": {
            "do_sample": False,
            "eos_token_id": stop,
            "pad_token_id": stop[1],
            "temperature": 0.7,
            "top_p": 0.9,
            "top_k": 40,
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "model_max_length": 4096,
            "clean_up_tokenization_spaces": False,
        },
        "preprocessor_config.json": {
            "image_processor_type": "Qwen2VLImageProcessor",
            "do_convert_rgb": True,
            "do_resize": True,
            "do_rescale": True,
            "do_normalize": True,
            "resample": 3,
            "rescale_factor": 1 / 255,
            "image_mean": [0.5] * 3,
            "image_std": [0.5] * 3,
            "patch_size": 16,
            "temporal_patch_size": 2,
            "merge_size": 2,
            "size": {"shortest_edge": LEAST_TOKENS * TILE**2, "longest_edge": MOST_TOKENS * TILE**2},
        },
        "chat_template.jinja": TEMPLATE,
    }


def write_small_files(folder):
    for name, content in small_files().items():
        text = content if isinstance(content, str) else json.dumps(content, indent=2) + "\n"
        (Path(folder) / name).write_text(text)


def save_weights(folder, weights):
    """bf16 safetensors in shards, with their index."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    shards, size = [{}], 0
    for name, tensor in weights.items():
        tensor = tensor.detach().to(torch.bfloat16).cpu().contiguous()
        if size + tensor.nbytes > SHARD:
            shards.append({})
            size = 0
        shards[-1][name] = tensor.clone()
        size += tensor.nbytes
    places = {}
    for i, shard in enumerate(shards):
        file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        places.update(dict.fromkeys(shard, file))
    total = sum(t.nbytes for shard in shards for t in shard.values())
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")


def load_weights(folder, dtype=torch.float32):
    """name -> tensor of all shards in `folder`."""
    weights = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        weights.update(load_file(file))
    return {name: tensor.to(dtype) for name, tensor in weights.items()}
