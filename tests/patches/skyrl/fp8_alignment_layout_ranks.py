"""The tokens that SkyRL gives its model, for many sizes of tensor and context parallelism, in one process.

``--out FOLDER PART SIZES``, one rank, with the folder of a SkyRL release on sys.path. Its groups are megatron-core's,
of torch's "fake" backend, whose collectives do nothing; this process is one rank after the other. Where context
parallelism gathers, it gets what the other rank had.

SkyRL's `MegatronModelWrapper` is real. In the place of megatron-core's schedule is a loop; in the place of the model is
one whose output for a token is the token. Two real ranks with a real model: fp8_alignment_ranks.py.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tests.harness import megatron_on_cpu

torch.set_num_threads(1)
megatron_on_cpu.install()

import torch.testing._internal.distributed.fake_pg  # registers the backend
from megatron.core import parallel_state
from megatron.core.transformer.moe.router_replay import RouterReplay
from megatron.core.transformer.transformer_config import TransformerConfig

import rlhf_patches
from tests.harness import skyrl_on_cpu

CONTEXT_PARALLEL = (1, 2)
RECIPES = (None, "delayed", "tensorwise", "mxfp8", "blockwise", "custom", "of the future")
LENGTHS = (13, 0, 1, 160, 7, 128, 16)
WIDTH, LAYERS, TOP_K = 160, 2, 2
METHODS = ("forward", "forward_backward_mini_batch")
PATCHES = "skyrl-*fp8-alignment"


def make_batch() -> dict[str, Any]:
    """Ragged rows, one of them empty: padded on the left, or on the right every third time. Tokens are never 0."""
    generator = torch.Generator().manual_seed(5)
    columns = torch.arange(WIDTH)
    mask = torch.stack(
        [columns < length if row % 3 == 2 else columns >= WIDTH - length for row, length in enumerate(LENGTHS)]
    )
    sequences = torch.randint(1, 1000, (len(LENGTHS), WIDTH), generator=generator) * mask
    return {
        "sequences": sequences,
        "attention_mask": mask.long(),
        "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
        "num_actions": WIDTH,
    }


def make_indices(batch: dict[str, Any]) -> torch.Tensor:
    """Experts that name their token and layer: ``[B, S, layers, topk]``."""
    layers = torch.arange(LAYERS * TOP_K).view(LAYERS, TOP_K) * 1000
    return (batch["sequences"][:, :, None, None] + layers) * batch["attention_mask"][:, :, None, None]


class Tokens(torch.nn.Module):
    """A model whose output for a token is the token; it keeps what it was given."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.given: dict[str, Any] = {}
        self.output = torch.empty(0)
        self.replacement: torch.Tensor | None = None

    def forward(self, ids: Any, positions: Any, mask: Any, packed_seq_params: Any = None) -> torch.Tensor:
        self.given = {
            "ids": ids,
            "positions": positions,
            "mask": mask,
            "cu_seqlens": None if packed_seq_params is None else packed_seq_params.cu_seqlens_q_padded,
            "longest": None if packed_seq_params is None else packed_seq_params.max_seqlen_q,
            "replay": [one.target_topk_idx for one in RouterReplay.global_router_replay_instances],
        }
        self.output = (ids if self.replacement is None else self.replacement).unsqueeze(-1).float()
        return self.output


def become_rank(tp: int, cp: int, cp_rank: int, pp: int = 1, pp_rank: int = 0) -> None:
    """This process is now the last tensor-parallel rank of that context- and pipeline-parallel rank."""
    parallel_state.destroy_model_parallel()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    rank = (pp_rank * cp + cp_rank) * tp + tp - 1
    store = torch.testing._internal.distributed.fake_pg.FakeStore()
    torch.distributed.init_process_group("fake", store=store, rank=rank, world_size=tp * cp * pp)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp,
        context_parallel_size=cp,
        pipeline_model_parallel_size=pp,
        create_gloo_process_groups=False,
    )


def make_config(tp: int, cp: int, recipe: str | None, sequence_parallel: bool, pp: int = 1) -> TransformerConfig:
    config = TransformerConfig(
        num_layers=LAYERS * pp,
        hidden_size=384,
        num_attention_heads=24,
        tensor_model_parallel_size=tp,
        context_parallel_size=cp,
        pipeline_model_parallel_size=pp,
        pipeline_dtype=torch.float32,
        sequence_parallel=sequence_parallel,
    )
    if recipe is not None:
        config.fp8, config.fp8_recipe = "hybrid", recipe
    return config


def schedule(forward_step_func: Any, data_iterator: Any, model: Any, num_microbatches: int, **_: Any) -> list[Any]:
    """In the place of megatron-core's `forward_backward_func`: what comes out of the model, restored by SkyRL."""
    return [{"log_probs": forward_step_func(data_iterator, model[0])[0][..., 0]} for _ in range(num_microbatches)]


def run(config: TransformerConfig, packed: bool, method: str, replay: bool = False) -> tuple[Tokens, Any]:
    """One micro-batch through one of the wrapper's methods; returns the model and what was restored."""
    module = skyrl_on_cpu.model_wrapper()
    module.get_forward_backward_func = lambda: schedule
    model = Tokens(config)
    algorithm = SimpleNamespace(policy_loss_type="regular")
    settings = SimpleNamespace(use_sample_packing=packed, algorithm=algorithm)
    wrapper = module.MegatronModelWrapper(settings, [model])
    batch = make_batch()
    RouterReplay.clear_global_router_replay_instances()
    if replay:
        for _ in range(LAYERS):
            RouterReplay()  # it puts itself into the list
        batch["rollout_expert_indices"] = make_indices(batch)
    restored = getattr(wrapper, method)([batch], WIDTH, len(LENGTHS))
    return model, restored if method == "forward" else restored[0]["log_probs"]


def numbers(given: dict[str, Any]) -> dict[str, Any]:
    """What a model was given, as lists."""
    return {
        key: [one.tolist() for one in value if one is not None]
        if isinstance(value, list)
        else value.tolist()
        if isinstance(value, torch.Tensor)
        else value
        for key, value in given.items()
    }


def digest(given: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(numbers(given)).encode()).hexdigest()


def combinations(tp: int, cp: int, recipes: tuple[str | None, ...]) -> Iterator[tuple[str, TransformerConfig, bool]]:
    """Name, config and whether sequences are packed."""
    for recipe, sequence_parallel, packed in itertools.product(recipes, (False, True), (False, True)):
        if (sequence_parallel and tp == 1) or (cp > 1 and not packed):  # neither exists
            continue
        config = make_config(tp, cp, recipe, sequence_parallel)
        yield f"{tp}-{cp}-{recipe}-{sequence_parallel}-{packed}", config, packed


def layouts(sizes: list[int], recipes: tuple[str | None, ...]) -> dict[str, Any]:
    """For each combination: the tokens of every rank, and whether SkyRL gets back what it put in."""
    outputs: dict[tuple[str, int], torch.Tensor] = {}
    found: dict[str, Any] = {}
    now: list[Any] = ["", 0]

    def all_gather(parts: list[torch.Tensor], mine: torch.Tensor, group: Any = None) -> None:
        for rank, part in enumerate(parts):
            if (now[0], rank) in outputs:
                part.copy_(outputs[now[0], rank])

    original, torch.distributed.all_gather = torch.distributed.all_gather, all_gather
    wanted = make_batch()["sequences"].float()
    # Twice: in the first round nothing of the other rank is known yet.
    for last, tp, cp in itertools.product((False, True), sizes, CONTEXT_PARALLEL):
        for cp_rank in range(cp if cp > 1 or last else 0):
            become_rank(tp, cp, cp_rank)
            for (name, config, packed), method in itertools.product(combinations(tp, cp, recipes), METHODS):
                now[:] = [name, cp_rank]
                try:
                    model, restored = run(config, packed, method)
                except RuntimeError as error:
                    found[f"{name}-{cp_rank}-{method}"] = {"failed": str(error)}
                    continue
                outputs[name, cp_rank] = model.output
                report = {
                    "failed": None,
                    "tokens": model.given["ids"].shape[1],
                    "cu_seqlens": numbers(model.given)["cu_seqlens"],
                    "longest": model.given["longest"],
                    "digest": digest(model.given),
                    "restored": torch.equal(restored, wanted),
                }
                if config.fp8_recipe == "delayed" and config.fp8 and not config.sequence_parallel:
                    report["given"] = numbers(model.given)
                found[f"{name}-{cp_rank}-{method}"] = report
    torch.distributed.all_gather = original
    return found


def replays(sizes: list[int]) -> dict[str, bool]:
    """Whether every rank's routers replay the experts of the tokens that the model is given."""
    found = {}
    for tp, cp in itertools.product(sizes, CONTEXT_PARALLEL):
        for cp_rank in range(cp):
            become_rank(tp, cp, cp_rank)
            cases = combinations(tp, cp, (None, "delayed", "blockwise"))
            for (name, config, packed), method in itertools.product(cases, METHODS):
                if config.sequence_parallel != (tp > 1):  # SkyRL assumes it
                    continue
                model, _ = run(config, packed, method, replay=True)
                # The last of the parts that sequence parallelism makes.
                part = model.given["ids"].shape[1] // tp
                ids = model.given["ids"][:, (tp - 1) * part : tp * part].flatten()
                layers = torch.arange(LAYERS * TOP_K).view(LAYERS, TOP_K) * 1000
                expected = (ids[:, None, None] + layers) * (ids > 0)[:, None, None]
                replayed = model.given["replay"]
                found[f"{name}-{cp_rank}-{method}"] = len(replayed) == LAYERS and all(
                    torch.equal(one, expected[:, layer]) for layer, one in enumerate(replayed)
                )
    return found


def later_stage() -> dict[str, bool]:
    """On a pipeline stage that is not the first, SkyRL's tokens are handed through, and the layout is the first's."""
    found = {}
    for packed in (False, True):
        given: list[Any] = []
        for pp_rank in (0, 1):
            become_rank(2, 1, 0, pp=2, pp_rank=pp_rank)
            module = skyrl_on_cpu.model_wrapper()
            module.get_forward_backward_func = lambda: schedule
            model = Tokens(make_config(2, 1, "delayed", True, pp=2))
            # What comes out of a later stage has as many tokens as went into the first.
            model.replacement = given[0]["ids"] if given else None
            settings = SimpleNamespace(use_sample_packing=packed, algorithm=None)
            module.MegatronModelWrapper(settings, [model]).forward([make_batch()], WIDTH, len(LENGTHS))
            given.append(model.given)
        first, second = (numbers(one) for one in given)
        found[f"packed {packed}"] = torch.equal(given[1]["ids"], make_batch()["sequences"]) and all(
            first[key] == second[key] for key in ("cu_seqlens", "longest", "mask", "positions")
        )
    return found


def of_0_3(sizes: list[int]) -> dict[str, Any]:
    """What the functions of SkyRL 0.3.0 make of the same batch with ``fp8_enabled``."""
    import importlib

    utils = importlib.import_module("skyrl.backends.skyrl_train.distributed.megatron.megatron_utils")
    found = {}
    for tp, cp in itertools.product(sizes, CONTEXT_PARALLEL):
        for cp_rank in range(cp):
            become_rank(tp, cp, cp_rank)
            batch = make_batch()
            mask = batch["attention_mask"].bool()
            ids, params = utils.preprocess_packed_seqs(batch["sequences"], mask, fp8_enabled=True)
            given = {"ids": ids, "cu_seqlens": params.cu_seqlens_q_padded, "longest": params.max_seqlen_q}
            found[f"{tp}-{cp}-True-{cp_rank}"] = numbers(given)
            if cp == 1:
                names = ("ids", "mask", "positions")
                values = utils.remove_left_padding(batch["sequences"], mask, batch["position_ids"], fp8_enabled=True)
                found[f"{tp}-{cp}-False-{cp_rank}"] = numbers(dict(zip(names, values, strict=True)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("part", choices=("before-and-after", "twice", "of-0.3"))
    parser.add_argument("sizes", type=int, nargs="+", help="of tensor parallelism")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    sizes, few = options.sizes, (None, "delayed")
    report: dict[str, Any] = {"skyrl": skyrl_on_cpu.install()}
    if options.part == "of-0.3":
        report["given"] = of_0_3(sizes)
    else:
        whole = options.part == "before-and-after"
        report["before"] = layouts(sizes, few)
        report["replays_before"] = replays(sizes) if whole else {}
        rlhf_patches.apply(only=PATCHES)
        report["after"] = layouts(sizes, RECIPES if whole else few)
        report["replays_after"] = replays(sizes) if whole else {}
        report["later_stage"] = later_stage()
        report["report"] = [row.to_dict() for row in rlhf_patches.report() if "fp8" in row.name]
        rlhf_patches.revert()
        report["reverted"] = layouts(sizes[:1], few)
    (options.out / "rank0.json").write_text(json.dumps(report))
