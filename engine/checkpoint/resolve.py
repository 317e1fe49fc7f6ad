"""From what a person calls a model to the folder that holds it."""

from __future__ import annotations

import re
from pathlib import Path

from tfmagic.errors import Refusal

EMBEDDED = Path(__file__).resolve().parent.parent / "embedded" / "model"
"""The model that ships inside the package."""

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
FILES = [
    *("config.json", "generation_config.json", "*processor_config.json"),
    *("tokenizer.json", "tokenizer_config.json", "chat_template.*"),
    *("model*.safetensors", "model*.safetensors.index.json"),
]
"""What is fetched of a repository: no pickles, no code, no other formats of the same weights."""


def resolve(model: str | None) -> Path:
    """The folder of `model`: None or "embedded" is the shipped model, else a folder, else a Hugging Face id.

    An id is fetched into huggingface_hub's own cache, or found there when there is no network.
    Raises Refusal when there is no such folder, no such id, or no way to fetch it.
    """
    if model in (None, "", "embedded"):
        if not (EMBEDDED / "config.json").is_file():
            raise Refusal(f"The embedded model is missing from {EMBEDDED}.", "Reinstall tfmagic, or name a model.")
        return EMBEDDED
    try:
        path = Path(model).expanduser()
        if path.is_dir():
            return path.absolute()
        if path.is_file():
            raise not_a_folder(path)
    except (OSError, RuntimeError, ValueError) as error:  # a name too long, an unknown ~user, a NUL character
        cause = getattr(error, "strerror", None) or error
        raise Refusal(f"{model[:80]!r} is not a usable path: {cause}.", "Name a folder or a Hugging Face id.") from None
    if HUB_ID.fullmatch(model):
        return from_hub(model)
    raise Refusal(
        f"There is no model folder {model[:200]!r}, and it is no Hugging Face id either.",
        "Check the spelling: a folder with config.json, an id such as Qwen/Qwen3.5-0.8B, or `embedded`.",
    )


def not_a_folder(path: Path) -> Refusal:
    if path.suffix.lower() == ".gguf":
        return Refusal(f"{path.name} is a GGUF file; GGUF is not read yet.", "Use the model's safetensors checkpoint.")
    return Refusal(f"{path} is a file, and a model is a folder.", "Name the folder that holds its config.json.")


def from_hub(repo: str) -> Path:
    """The local snapshot of a Hugging Face repository. Raises Refusal with the way out of each failure."""
    from huggingface_hub import errors, snapshot_download

    local = "or name a local folder that holds the model"
    try:
        return Path(snapshot_download(repo, allow_patterns=FILES))
    except errors.HFValidationError:
        raise Refusal(f"{repo!r} is not a possible Hugging Face id.", f"Check the spelling, {local}.") from None
    except errors.GatedRepoError:
        fix = f"Accept them at https://huggingface.co/{repo} and set HF_TOKEN, {local}."
        raise Refusal(f"Hugging Face gives {repo} only to those who accepted its terms.", fix) from None
    except errors.RepositoryNotFoundError:
        fix = f"Check the spelling; for a private model set HF_TOKEN; {local}."
        raise Refusal(f"Hugging Face knows no model {repo!r}.", fix) from None
    except Exception as error:  # the network's many failures, in whichever HTTP library the hub client uses
        cause = first_line(error.__cause__ or error)
        raise Refusal(
            f"{repo} is not in the local Hugging Face cache and could not be fetched ({cause}).",
            f"Check the network, HF_HUB_OFFLINE and the free disk space, {local}.",
        ) from None


def first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
