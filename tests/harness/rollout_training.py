"""Train a real, tiny megatron-core GPT on CPU ranks, entering training once per rollout as RLHF does.

    torchrun --standalone --nproc-per-node 2 tests/harness/torchrun_rank.py tests.harness.rollout_training \
        --out DIR [--scenario S] [--entry E] [--apply] ...

Each rank writes `DIR/rank<N>.json`. A training run that fails is a result like any other: the report
then has a "failure", and the exit status is 0, so that torchrun does not end the other rank before it
has reported. Any other exit status is a fault of this harness.

Scenarios:
    train            rollouts that re-enter training, each followed by a save if `--save`
    reference        the same steps in one uninterrupted run, which meets none of the defects
    shared-config    an actor and a critic on one config object, trained in turns; their reduced
                     gradients are compared with float64 ones computed without data parallelism
    custom-no-sync   like train, on a config that holds a user's own no_sync_func

Entries, which install the data-parallel hooks on the config at the start of every rollout:
    none-twice       installs only where nothing is installed yet (so only the first time): no assertion
                     can fail, which leaves the forward pre-hooks as the only defect
    reinstall        installs this model's own every time: what a repaired framework does
    never            installs none, so that each micro-batch counts as the last one
    slime, megatron-lm, megatron-lm-newer
                     the functions of tests/harness/standins
    MODULE:FUNCTION  `FUNCTION(model_chunks, config, optimizer, ddp_config)`
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import datetime
import functools
import hashlib
import importlib
import importlib.metadata
import inspect
import json
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent

VOCABULARY, SEQUENCE, BATCH = 64, 16, 2  # sizes of the models and of a micro-batch
BUCKET_SIZE = 8_000  # parameters: small enough for several buckets, without which nothing overlaps
STANDINS = {  # entry: the folder that the stand-in is imported from
    "slime": "standins",
    "megatron-lm": "standins/megatron_lm",
    "megatron-lm-newer": "standins/megatron_lm_newer",
}
COUNTED = (
    "all_reduce",
    "reduce_scatter_tensor",
    "_reduce_scatter_base",
    "all_gather_into_tensor",
    "_all_gather_base",
    "broadcast",
)


# -- command line and surroundings ---------------------------------------------------------------------


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    summary, _, details = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flag = argparse.BooleanOptionalAction
    parser.add_argument("--out", type=Path, required=True, help="folder for the reports")
    parser.add_argument(
        "--scenario", choices=("train", "reference", "shared-config", "custom-no-sync"), default="train"
    )
    parser.add_argument("--entry", default="none-twice", help="see above")
    parser.add_argument("--apply", action="store_true", help="apply rlhf_patches")
    parser.add_argument("--rollouts", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3, help="in each rollout")
    parser.add_argument("--micro-batches", default="2,3", help="in each step: a number, or several that take turns")
    parser.add_argument("--save", action=flag, default=False, help="save after every rollout")
    parser.add_argument("--overlap-param-gather", action=flag, default=True, help="off: no forward pre-hooks")
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--timeout", type=float, default=30.0, help="of one collective, in seconds")
    args = parser.parse_args(argv)
    args.micro_batches = [int(number) for number in args.micro_batches.split(",")]
    return args


@functools.cache
def on_cpu() -> collections.Counter[str]:
    """Let megatron run on a CPU and count its calls of collectives. Must precede its import, which binds them."""
    import torch.distributed

    from tests.harness import megatron_on_cpu

    torch.set_num_threads(1)  # two ranks share few cores, and one thread adds up in one order only
    calls: collections.Counter[str] = collections.Counter()

    def counting(name: str, collective: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return collective(*args, **kwargs)

        return counted

    for name in COUNTED:
        if hasattr(torch.distributed, name):
            setattr(torch.distributed, name, counting(name, getattr(torch.distributed, name)))
    megatron_on_cpu.install()
    return calls


def prepare(args: argparse.Namespace) -> collections.Counter[str]:
    """Everything that has to happen before megatron is used; it may be loaded already, unpatched."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    calls = on_cpu()
    if args.entry in STANDINS:
        # Before the patches are applied: a framework that cannot be found then counts as absent.
        # `megatron` is a namespace package, to which this adds megatron.training.
        sys.path.append(str(HERE / STANDINS[args.entry]))
    if args.apply:
        import rlhf_patches

        rlhf_patches.apply()
    return calls


def start_megatron(args: argparse.Namespace) -> None:
    import torch
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    # Short, so that a rank whose peer has died does not wait for it.
    timeout = datetime.timedelta(seconds=args.timeout)
    torch.distributed.init_process_group("gloo", timeout=timeout)
    parallel_state.initialize_model_parallel(distributed_timeout_minutes=args.timeout / 60)
    model_parallel_cuda_manual_seed(args.seed)


# -- models and data -----------------------------------------------------------------------------------


@dataclasses.dataclass
class Trainee:
    """A model in data-parallel training, as frameworks hold it: a list of chunks, here of one."""

    role: str
    chunks: list[Any]
    optimizer: Any
    config: Any
    ddp_config: Any
    steps_done: int = 0

    @property
    def uses_forward_pre_hook(self) -> bool:
        return self.ddp_config.use_distributed_optimizer and self.ddp_config.overlap_param_gather

    def forward_pre_hooks(self) -> int:
        return sum(len(module._forward_pre_hooks) for chunk in self.chunks for module in chunk.module.modules())


def make_config() -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
    )


def make_gpt(config: Any, seed: int) -> Any:
    import torch
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    torch.manual_seed(seed)  # the same weights on every rank
    return GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )


def make_trainee(args: argparse.Namespace, role: str, config: Any, seed: int) -> Trainee:
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    ddp_config = DistributedDataParallelConfig(
        overlap_grad_reduce=True,
        overlap_param_gather=args.overlap_param_gather,
        use_distributed_optimizer=True,
        bucket_size=BUCKET_SIZE,
    )
    chunk = DistributedDataParallel(config=config, ddp_config=ddp_config, module=make_gpt(config, seed))
    # Some releases keep these two here as well, others in the data-parallel config only.
    overlap = {"overlap_grad_reduce": True, "overlap_param_gather": args.overlap_param_gather}
    known = {field.name for field in dataclasses.fields(OptimizerConfig)}
    optimizer_config = OptimizerConfig(
        optimizer="adam",
        lr=3e-3,
        weight_decay=0.01,
        clip_grad=1.0,
        use_distributed_optimizer=True,
        **{name: value for name, value in overlap.items() if name in known},
    )
    optimizer = get_megatron_optimizer(optimizer_config, [chunk])
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    return Trainee(role, [chunk], optimizer, config, ddp_config)


@dataclasses.dataclass
class Batch:
    inputs: Any
    targets: Any
    values: Any


def make_batch(seed: int, rank: int, step: int, micro_batch: int) -> Batch:
    """Depends on the arguments only: every rank can make every other's, and every run the same."""
    import torch

    mixed = ((seed * 31 + rank) * 1_009 + step) * 101 + micro_batch
    generator = torch.Generator().manual_seed(mixed)
    tokens = torch.randint(VOCABULARY, (BATCH, 1), generator=generator)
    for _ in range(SEQUENCE):
        # A rule to be learned, so that the loss falls, and some noise, so that micro-batches differ.
        noise = torch.randint(3, (BATCH, 1), generator=generator)
        tokens = torch.cat([tokens, (tokens[:, -1:] * 3 + 1 + noise) % VOCABULARY], dim=1)
    values = torch.rand((BATCH, SEQUENCE), generator=generator, dtype=torch.float64)
    return Batch(tokens[:, :-1], tokens[:, 1:], values)


def forward(model: Any, batch: Batch) -> Any:
    import torch

    positions = torch.arange(SEQUENCE).expand_as(batch.inputs)
    above_diagonal = torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)
    return model(batch.inputs, positions, above_diagonal[None, None])


def loss_of(role: str, logits: Any, batch: Batch) -> Any:
    """In the precision of the logits, which is float64 for the model that judges the gradients."""
    from torch.nn import functional

    if role == "critic":
        return functional.mse_loss(logits[..., 0], batch.values.to(logits.dtype))
    return functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten())


# -- entries -------------------------------------------------------------------------------------------

Entry = Callable[[Trainee, int, Callable[[], None]], None]


def find_entry(name: str) -> Entry:
    """`entry(trainee, rollout, run_steps)` installs the hooks on the config and then runs the steps."""
    own = {"none-twice": _none_twice, "reinstall": _reinstall, "never": _never}
    if name in own:
        install = own[name]
    elif name == "slime":
        slime_model = importlib.import_module("slime.backends.megatron_utils.model")
        return lambda trainee, rollout, run_steps: slime_model.train(
            rollout, trainee.chunks, trainee.optimizer, framework_args(trainee), run_steps
        )
    elif name in STANDINS:
        training = importlib.import_module("megatron.training.training")
        return lambda trainee, rollout, run_steps: training.train(
            trainee.chunks, trainee.optimizer, trainee.config, framework_args(trainee), run_steps
        )
    else:
        module, _, function = name.partition(":")
        install = getattr(importlib.import_module(module), function)

    def entry(trainee: Trainee, rollout: int, run_steps: Callable[[], None]) -> None:
        install(trainee.chunks, trainee.config, trainee.optimizer, trainee.ddp_config)
        run_steps()

    return entry


def framework_args(trainee: Trainee) -> argparse.Namespace:
    """What the frameworks' functions read from their global arguments."""
    return argparse.Namespace(
        overlap_grad_reduce=trainee.ddp_config.overlap_grad_reduce,
        overlap_param_gather=trainee.ddp_config.overlap_param_gather,
        align_grad_reduce=True,
        align_param_gather=trainee.ddp_config.align_param_gather,
    )


def _reinstall(chunks: list[Any], config: Any, optimizer: Any, ddp_config: Any) -> None:
    config.grad_scale_func = optimizer.scale_loss
    config.no_sync_func = chunks[0].no_sync
    config.grad_sync_func = chunks[0].start_grad_sync


def _none_twice(chunks: list[Any], config: Any, optimizer: Any, ddp_config: Any) -> None:
    if config.no_sync_func is None:
        _reinstall(chunks, config, optimizer, ddp_config)


def _never(chunks: list[Any], config: Any, optimizer: Any, ddp_config: Any) -> None:
    config.grad_scale_func = optimizer.scale_loss


# -- training ------------------------------------------------------------------------------------------


def disable_forward_pre_hook(chunks: list[Any], param_sync: bool = True) -> None:
    for chunk in chunks:
        if "param_sync" in inspect.signature(chunk.disable_forward_pre_hook).parameters:
            chunk.disable_forward_pre_hook(param_sync=param_sync)
        else:  # before megatron-core 0.11, which always synchronizes
            chunk.disable_forward_pre_hook()


def enable_forward_pre_hook(chunks: list[Any]) -> None:
    for chunk in chunks:
        chunk.enable_forward_pre_hook()


class Training:
    """Trains, and writes down what happens in `report`."""

    def __init__(self, args: argparse.Namespace, calls: collections.Counter[str]) -> None:
        import torch

        self.args = args
        self.calls = calls
        self.rank = torch.distributed.get_rank()
        self.ranks = torch.distributed.get_world_size()
        self.entry = find_entry(args.entry)
        self.position: dict[str, Any] = {"rollout": None, "step": None, "doing": "set-up"}
        self.report: dict[str, Any] = {
            "rank": self.rank,
            "scenario": args.scenario,
            "entry": args.entry,
            "versions": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "megatron-core": megatron_version(),
            },
            "losses": {},
            "steps": [],
            "saves": [],
            "gradients": [],
            "final_state": {},
            "failure": None,
        }

    def run(self) -> None:
        """Run the scenario. An exception of the training goes into the report and not further."""
        try:
            for line in self.scenario():
                if self.rank == 0:
                    print(line, flush=True)
        except Exception as error:
            self.report["failure"] = self.describe(error)
            first_line = f"{type(error).__name__}: {error}".splitlines()[0]
            print(f"rank {self.rank}, {self.position}: {first_line}", flush=True)
        self.report["collectives"] = dict(self.calls)

    def describe(self, error: Exception) -> dict[str, Any]:
        frames = [
            f"{frame.f_globals.get('__name__')}:{frame.f_code.co_name} line {line}"
            for frame, line in traceback.walk_tb(error.__traceback__)
        ]
        return {
            "exception": type(error).__name__,
            "message": str(error),
            **self.position,
            "traceback": frames[-6:],
        }

    def scenario(self) -> Iterator[str]:
        """Yield a line of progress after each rollout."""
        args = self.args
        config = make_config()
        actor = make_trainee(args, "actor", config, args.seed)
        trainees = [actor]
        if args.scenario == "shared-config":
            trainees.append(make_trainee(args, "critic", config, args.seed + 1))
        self.report["buckets"] = sum(len(buffer.buckets) for buffer in actor.chunks[0].buffers)
        if args.scenario == "custom-no-sync":
            config.no_sync_func = custom_no_sync

        # The reference makes all the steps in what is, to the framework, a single rollout.
        whole = args.scenario == "reference"
        rollouts, steps = (1, args.rollouts * args.steps) if whole else (args.rollouts, args.steps)
        for rollout in range(1, rollouts + 1):
            for trainee in trainees:
                self.train(trainee, rollout, steps)
                if args.save and not whole:
                    self.save(trainee, rollout)
                loss = float.fromhex(self.report["losses"][trainee.role][-1])
                yield f"rollout {rollout}/{rollouts} {trainee.role}: loss {loss:.6f}"
        for trainee in trainees:
            self.report["final_state"][trainee.role] = digest(gather_state(trainee))

    def train(self, trainee: Trainee, rollout: int, steps: int) -> None:
        """One rollout, in the order of slime's `train`."""
        self.position = {"rollout": rollout, "step": None, "doing": "train"}
        chunks, config = trainee.chunks, trainee.config

        def run_steps() -> None:
            pre_hooks = trainee.uses_forward_pre_hook
            if pre_hooks:
                # The first step runs on the parameters as they are: nothing has been dispatched.
                disable_forward_pre_hook(chunks, param_sync=False)
                param_sync_func, config.param_sync_func = config.param_sync_func, None
            for step in range(1, steps + 1):
                self.position["step"] = step
                self.train_step(trainee)
                if pre_hooks and step == 1:
                    enable_forward_pre_hook(chunks)
                    config.param_sync_func = param_sync_func
            if pre_hooks:
                disable_forward_pre_hook(chunks)

        for chunk in chunks:
            chunk.train()
        self.entry(trainee, rollout, run_steps)

    def train_step(self, trainee: Trainee) -> None:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        config, step = trainee.config, trainee.steps_done
        number = self.args.micro_batches[step % len(self.args.micro_batches)]
        batches = [make_batch(self.args.seed, self.rank, step, index) for index in range(number)]
        before = self.calls.copy()
        # How many collectives there had been when the last micro-batch began, and when the backward
        # passes were over: the first tells whether no_sync worked, the second whether there was overlap.
        at: dict[str, collections.Counter[str]] = {}

        def forward_step(iterator: Iterator[Batch], model: Any) -> tuple[Any, Callable[..., Any]]:
            at["last_micro_batch"] = self.calls.copy()
            batch = next(iterator)
            output = forward(model, batch)

            def loss_function(logits: Any) -> tuple[Any, dict[str, Any]]:
                loss = loss_of(trainee.role, logits, batch)
                return loss, {"loss": loss.detach().clone()}

            return output, loss_function

        finalize = config.finalize_model_grads_func

        def noting_finalize(*args: Any, **kwargs: Any) -> Any:
            at["finalize"] = self.calls.copy()
            return finalize(*args, **kwargs)

        for chunk in trainee.chunks:
            chunk.zero_grad_buffer()
        trainee.optimizer.zero_grad()
        config.finalize_model_grads_func = noting_finalize
        try:
            reduced = get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=iter(batches),
                model=trainee.chunks,
                num_microbatches=number,
                seq_length=SEQUENCE,
                micro_batch_size=BATCH,
                forward_only=False,
            )
        finally:
            config.finalize_model_grads_func = finalize
        if self.args.scenario == "shared-config":
            self.report["gradients"].append(
                {"role": trainee.role, **self.position, **self.gradient_errors(trainee, number)}
            )
        updated, grad_norm, _ = trainee.optimizer.step()
        if not updated:
            raise RuntimeError("the optimizer skipped its step")

        loss = sum(entry["loss"].item() for entry in reduced) / number
        self.report["losses"].setdefault(trainee.role, []).append(loss.hex())
        self.report["steps"].append(
            {
                "role": trainee.role,
                "rollout": self.position["rollout"],
                "step": self.position["step"],
                "micro_batches": number,
                "grad_norm": float(grad_norm).hex(),
                "forward_pre_hooks": trainee.forward_pre_hooks(),
                "reduce_scatters": {
                    "before_last_micro_batch": reduce_scatters(at["last_micro_batch"] - before),
                    "during_backward": reduce_scatters(at["finalize"] - before),
                    "total": reduce_scatters(self.calls - before),
                },
                "collectives": dict(self.calls - before),
            }
        )
        trainee.steps_done += 1

    def save(self, trainee: Trainee, rollout: int) -> None:
        """In the order of slime's `save`, which runs between two rollouts."""
        self.position = {"rollout": rollout, "step": None, "doing": "save"}
        if trainee.uses_forward_pre_hook:
            disable_forward_pre_hook(trainee.chunks)
        state = gather_state(trainee)
        if trainee.uses_forward_pre_hook:
            enable_forward_pre_hook(trainee.chunks)
        self.report["saves"].append({"role": trainee.role, "rollout": rollout, "state": digest(state)})

    def gradient_errors(self, trainee: Trainee, number: int) -> dict[str, float]:
        """Compare the gradients that the optimizer is about to use with the exact ones.

        Exact means: every rank's micro-batches through a float64 model, averaged, with no data
        parallelism. What this rank's optimizer uses is its own shard of each gradient bucket.
        """
        import torch

        module = trainee.chunks[0].module
        exact = make_gpt(make_config(), seed=0).double()
        with torch.no_grad():
            # They are complete here: the forward passes of this step have needed all of them.
            for copy, parameter in zip(exact.parameters(), module.parameters(), strict=True):
                copy.copy_(parameter)
        for rank in range(self.ranks):
            for index in range(number):
                batch = make_batch(self.args.seed, rank, trainee.steps_done, index)
                logits = forward(exact, batch)
                if logits.dtype is not torch.float64:
                    raise RuntimeError(f"the exact model computes in {logits.dtype}")
                (loss_of(trainee.role, logits, batch) / (number * self.ranks)).backward()

        expected = {name: parameter.grad for name, parameter in exact.named_parameters()}
        name_of = {parameter: name for name, parameter in module.named_parameters()}
        error = scale = 0.0
        for bucket in (bucket for buffer in trainee.chunks[0].buffers for bucket in buffer.buckets):
            wanted = torch.zeros_like(bucket.grad_data, dtype=torch.float64)
            for parameter in bucket.params:
                start = parameter.main_grad.storage_offset() - bucket.grad_data.storage_offset()
                wanted[start : start + parameter.numel()] = expected[name_of[parameter]].flatten()
            shard = slice(None)
            if trainee.ddp_config.use_distributed_optimizer:
                length = bucket.grad_data.numel() // self.ranks
                shard = slice(self.rank * length, (self.rank + 1) * length)
            difference = bucket.grad_data[shard].double() - wanted[shard]
            error = max(error, difference.abs().max().item())
            scale = max(scale, wanted[shard].abs().max().item())
        return {"max_absolute": error, "max_relative": error / scale}


@contextlib.contextmanager
def custom_no_sync() -> Iterator[None]:
    """A user's own, which no framework supports together with overlapping grad-reduce."""
    yield


def reduce_scatters(calls: collections.Counter[str]) -> int:
    return calls["reduce_scatter_tensor"] + calls["_reduce_scatter_base"]


def gather_state(trainee: Trainee) -> dict[str, Any]:
    """A copy, as a checkpoint would hold it."""
    state = trainee.chunks[0].module.state_dict()
    return {name: value.detach().clone() for name, value in state.items() if hasattr(value, "detach")}


def digest(state: dict[str, Any]) -> str:
    """Equal for two ranks, or two runs, if and only if every parameter is the same, bit for bit."""
    summary = hashlib.sha256()
    for name in sorted(state):
        summary.update(name.encode() + b"\0" + state[name].contiguous().numpy().tobytes())
    return summary.hexdigest()


def megatron_version() -> str:
    try:
        return importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def main(argv: list[str] | None = None) -> None:
    started = time.monotonic()
    args = parse(argv)
    calls = prepare(args)
    import torch

    start_megatron(args)
    training = Training(args, calls)
    set_up = time.monotonic()
    training.run()
    now = time.monotonic()
    training.report["seconds"] = {"start": round(set_up - started, 2), "training": round(now - set_up, 2)}
    args.out.mkdir(parents=True, exist_ok=True)
    report = json.dumps(training.report, indent=1)
    (args.out / f"rank{training.rank}.json").write_text(report + "\n", encoding="utf-8")
    if training.report["failure"] is None:
        # After a failure the ranks may be at different collectives: then the end of the process is
        # what tells the other one.
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
