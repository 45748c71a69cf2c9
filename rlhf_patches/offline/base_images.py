"""The frameworks that a base image brings, with the versions that its tag has."""

from __future__ import annotations

import re
from collections.abc import Iterator

from .pins import Entry, Pin, Unread, shown

_NEXT = "`pip freeze | rlhf-patches audit -` in it"
_TRAINERS = "torch, transformers, trl, peft, accelerate and deepspeed"
# By the image's name: what it certainly contains. Tags name the versions of some.
_CONTAIN = (
    (r"nvcr\.io/nvidia/pytorch", "torch and transformer-engine"),
    (r"nvcr\.io/nvidia/nemo(?:-rl)?", "torch, transformer-engine and megatron-core"),
    (r"(?:axolotlai|winglian)/axolotl.*", _TRAINERS),
    (r"hiyouga/(?:llamafactory|pytorch).*", "torch, and LLaMA-Factory's transformers, trl, peft and accelerate"),
    (r"unsloth/.*", "torch, transformers, trl, peft and accelerate"),
    (r"huggingface/(?:trl|transformers|accelerate|peft)[\w-]*", "torch and transformers"),
    (r"verlai/verl|.*/verl", "torch, vllm or SGLang, and transformers"),
    (r"slimerl/slime|.*/slime", "torch, megatron-core and SGLang"),
    (r"novaskyai/skyrl[\w-]*", "torch and vllm"),
    (r"deepspeed/.*", "torch and deepspeed"),
    (r"vllm/vllm[\w-]*", "torch, transformers and vllm"),
    (r"(?:lmsysorg|ghcr\.io/sgl-project)/sglang", "torch and transformers"),
    (r".*modelscope.*|.*/ms-swift", "torch, transformers, trl, peft and ms-swift"),
    (r".*pytorch.*|.*deep-learning.*|.*huggingface.*", "torch"),
)
_TAGS = {
    "torch": "torch",
    "pytorch": "torch",
    "swift": "ms-swift",
    "te": "transformer-engine",
    "mcore": "megatron-core",
    **{name: name for name in ("transformers", "trl", "peft", "accelerate", "deepspeed", "vllm")},
}
_IN_TAG = re.compile(rf"(?<![a-z0-9])({'|'.join(_TAGS)})[-_]?v?(\d+(?:\.\d+)+(?:\.?(?:post|rc|dev)\d+)?)(?![\d.])")
_VERSION = re.compile(r"v?(\d+\.\d+\.\d+(?:\.?(?:post|rc)\d+)?)(?=-|$)")


def read(image: str, line: str, where: str) -> Iterator[Entry]:
    """The entries of an image: a pin for each version in its tag, and what the tag does not say.

    Args:
        image: the image with its tag.
        line: the instruction, which is searched for names of frameworks.
        where: file and line.
    """
    address, _, tag = image.partition("@")[0].rpartition(":") if ":" in image.rpartition("/")[2] else (image, "", "")
    found = dict[str, str]()
    for name, version in _IN_TAG.findall(tag.lower()):
        found.setdefault(_TAGS[name], version)
    own = {"pytorch/pytorch": "torch", "vllm/vllm-openai": "vllm"}.get(address.removeprefix("docker.io/"))
    version = _VERSION.match(tag)
    if own and version:
        found[own] = version[1]
    for name, text in found.items():
        exact = text if text.count(".") >= 2 else None  # verl's images for 0.5 are for each 0.5.x
        yield Pin(name, exact, where, f"in {image}" if exact else f"not pinned: {image} has {text}")
    known = next((what for name, what in _CONTAIN if re.fullmatch(name, address.removeprefix("docker.io/"))), None)
    if own and version:
        return
    if known:
        more = " and no version of others" if found else ""
        yield Unread(
            where,
            f"FROM {shown(image)} contains {known}{more}; the tag does not say which: run {_NEXT}",
        )
    elif not found and "$" in image:
        yield Unread(where, f"FROM {shown(image)} has no value here: name the image, or run {_NEXT}")
    elif not found:
        yield Unread(where, f"FROM {shown(line)} is not read", mention=line)
