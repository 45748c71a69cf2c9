"""A GPT's optimizer in checkpoints of the format fully_reshardable: ``--folder FOLDER save`` or ``load``, gloo.

What is saved before apply() of megatron-core-reshardable-buckets and after it is loaded by as many ranks as there are
then, in both states again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from rlhf_patches.proving import states
from tests.harness import rollout_training as harness

harness.on_cpu()

from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module

NAME = "megatron-core-reshardable-buckets"
KEYS = ("param", "exp_avg", "exp_avg_sq")
CASES: dict[str, dict[str, Any]] = {
    "buckets": {"bucket_size": 3000},
    "buckets, on one rank": {"bucket_size": 3000, "efficient": True},
    "shared embeddings": {"bucket_size": None, "shared": True},
    "one bucket": {"bucket_size": None},
}


class Run:
    """A model in bf16 and its optimizer."""

    def __init__(self, *, bucket_size: int | None, efficient: bool = False, shared: bool = False) -> None:
        config = harness.make_config()
        config.num_layers = 1
        config.ffn_hidden_size += 8 * shared  # the other weights are no multiple of 128
        config.bf16, config.params_dtype = True, torch.bfloat16
        gpt = harness.make_gpt(config, 1)
        if shared:  # as Megatron marks those of a first and a last pipeline stage
            gpt.embedding.word_embeddings.weight.shared_embedding = True
        self.model = DistributedDataParallel(
            config=config,
            ddp_config=DistributedDataParallelConfig(
                use_distributed_optimizer=True, overlap_grad_reduce=bucket_size is not None, bucket_size=bucket_size
            ),
            module=Float16Module(config, gpt),
        )
        settings = OptimizerConfig(
            optimizer="adam",
            lr=1e-2,
            clip_grad=0.0,  # a norm of more or fewer shards differs in its last bits
            bf16=True,
            params_dtype=torch.bfloat16,
            use_distributed_optimizer=True,
        )
        self.optimizer = get_megatron_optimizer(settings, [self.model])
        (self.inner,) = getattr(self.optimizer, "chained_optimizers", [self.optimizer])
        self.metadata = {
            "distrib_optim_sharding_type": "fully_reshardable",
            "distrib_optim_fully_reshardable_mem_efficient": efficient,
        }

    def steps(self, *numbers: int) -> None:
        """With gradients that are the same on each rank, however many there are."""
        for number in numbers:
            self.model.zero_grad_buffer()
            self.optimizer.zero_grad()
            torch.manual_seed(number)
            for parameter in self.model.parameters():
                parameter.main_grad.copy_(torch.randn(parameter.shape))
            for group in (*self.model.bucket_groups, *self.model.expert_parallel_bucket_groups):
                if self.model.ddp_config.overlap_grad_reduce:
                    group.start_grad_sync()
            finalize_model_grads([self.model])
            self.optimizer.step()

    def sharded(self, loading: bool) -> dict[str, Any]:
        model = self.model.sharded_state_dict(metadata=self.metadata)
        return {"optimizer": self.optimizer.sharded_state_dict(model, loading, metadata=self.metadata)}

    def load(self, path: Path) -> None:
        self.steps(9)  # a new AdamW of torch has no state that could be loaded into
        read = dist_checkpointing.load(self.sharded(True), str(path))
        # Torch's has a step beside its moments, which Megatron keeps elsewhere: only Apex and TransformerEngine agree.
        put, get = self.inner._set_main_param_and_optimizer_states, self.inner._get_main_param_and_optimizer_states
        self.inner._set_main_param_and_optimizer_states = lambda one, found: put(
            one, {**found, "step": get(one)["step"]}
        )
        self.optimizer.load_state_dict(read["optimizer"])
        for held in self.inner.optimizer.state.values():  # all have one and the same now
            held["step"] = held["step"].clone()

    @property
    def states(self) -> dict[str, dict[str, torch.Tensor]]:
        """Of each parameter, put together from all ranks' shards by where each says that it is."""
        found = {name: {key: torch.zeros(one.numel()) for key in KEYS} for name, one in self.model.named_parameters()}
        inner = self.inner
        buckets = [one for buffer in inner.gbuf_ranges for several in buffer.values() for one in several]
        ranges = {parameter: at["param"] for bucket in buckets for parameter, at in bucket["param_map"].items()}
        for name, parameter in self.model.named_parameters():
            if parameter in ranges:
                held = inner._get_main_param_and_optimizer_states(parameter)
                for key in KEYS:
                    found[name][key][ranges[parameter].start : ranges[parameter].end] = held[key].detach()
            for one in found[name].values():
                torch.distributed.all_reduce(one)
        return found


def wrong(found: dict[str, Any], wanted: dict[str, Any]) -> dict[str, list[str]]:
    """The parameters that have another state, bit for bit, by what of it."""
    return {
        key: sorted(name for name in wanted if not torch.equal(found[name][key], wanted[name][key])) for key in KEYS
    }


def in_checkpoint(run: Run, sharded: dict[str, Any]) -> dict[str, dict[str, torch.Tensor]]:
    """Of each parameter, what a checkpoint is about to have."""
    names = {id(one): name for name, one in run.model.named_parameters()}
    model = nested_values(run.model.sharded_state_dict(metadata=run.metadata))
    keys = {one.key: names[id(one.data)] for one in model if id(one.data) in names}
    found: dict[str, dict[str, torch.Tensor]] = {}
    for tensors in sharded["optimizer"]["param_state"].values():
        for key, one in tensors.items():
            name = keys[one.key.removeprefix(f"optimizer.state.{key}.")]
            found.setdefault(name, {})[key] = one.data.flatten()
    return found


def saved(folder: Path | None, cases: list[str]) -> dict[str, Any]:
    """What is wrong in a checkpoint of each case, of the first one without a folder.

    With a folder it is saved, and beside it what should be in it.
    """
    found = {}
    for case in cases[: 1 if folder is None else None]:
        run = Run(**CASES[case])
        run.steps(1, 2)
        states_now = run.states
        sharded = run.sharded(False)
        rank = torch.distributed.get_rank()
        buckets = run.model.buffers[0].buckets
        found[case] = {
            "padding": [bucket.grad_data.numel() - bucket.numel_unpadded for bucket in buckets],
            "wrong": wrong(in_checkpoint(run, sharded), states_now) if rank == 0 else None,
        }
        if folder is not None:
            path = folder / case
            if rank == 0:
                path.mkdir(parents=True)
            torch.distributed.barrier()
            dist_checkpointing.save(sharded, str(path))
            run.steps(3, 4)
            states_then = run.states
            if rank == 0:
                torch.save([states_now, states_then], folder / f"{case}.pt")
    return found


def loaded(folder: Path, cases: list[str]) -> dict[str, Any]:
    """Of each state that was saved, and each case, what is wrong after the loading, and two steps later."""
    found: dict[str, Any] = {}
    for state in ("before", "after"):
        for case in cases:
            now, then = torch.load(folder / state / f"{case}.pt")
            run = Run(**CASES[case])
            run.load(folder / state / case)
            held = run.states
            run.steps(3, 4)
            sums = {
                name: [one.double().sum().item().hex() for one in several.values()] for name, several in held.items()
            }
            found.setdefault(state, {})[case] = {
                "loaded": wrong(held, now),
                "later": wrong(run.states, then),
                "sums": sums,
            }
    return found


def main() -> None:
    parser = states.parser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("what", choices=["save", "load"])
    parser.add_argument("cases", nargs="*", help="all, if none is named")
    arguments = parser.parse_args()
    cases = arguments.cases or [*CASES]
    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    if arguments.what == "load":
        states.report(NAME, lambda: loaded(arguments.folder, cases), arguments.out, reverted=False)
        return
    folders = iter((arguments.folder / "before", arguments.folder / "after", None))
    states.report(NAME, lambda: saved(next(folders), cases), arguments.out)
