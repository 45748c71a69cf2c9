"""Rehearsals of megatron-core's real schedules and optimizers on the CPU.

``--out FOLDER [--patch NAME] CASE...``: each case as released, and with the patch; rehearsal_cases.py has the cases.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from tests.harness import megatron_on_cpu

torch.set_num_threads(1)
megatron_on_cpu.install()

from megatron.core import model_parallel_config, package_info, parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.enums import ModelType
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import MegatronModule

import rlhf_patches
from hunt import megatron_gpt
from rlhf_patches import settings
from rlhf_patches.proving import states
from rlhf_patches.rehearsal import megatron_layout, results, start
from rlhf_patches.rehearsal.megatron_core import MegatronRehearsal
from rlhf_patches.rehearsal.trainer import Ended
from tests.harness import rehearsing, small_gpt
from tests.patches.megatron_core.rehearsal_cases import CASES, Case
from tests.patches.megatron_core.rehearsal_faults import BREAKING

LENGTH, ROWS = 12, 2
Relations = dict[str, list[str]]


class OwnPart(small_gpt.Attention):
    """Attention within a context-parallel rank's part of a sequence, which megatron-core refuses."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        divided, config.context_parallel_size = config.context_parallel_size, 1
        super().__init__(config, *args, **kwargs)
        config.context_parallel_size = divided


class Values(MegatronModule):
    """Layers that cannot be called here: each parameter has a gradient that its place in the whole model says."""

    model_type = ModelType.encoder_or_decoder

    def __init__(self, kind: str, layout: str) -> None:
        from tests.patches.megatron_core import transformer_engine_norms_ranks as norms

        config = norms.configuration(kind, layout, "learnable" if kind == "sinks" else "vanilla")
        super().__init__(config)
        self.layers = norms.layers(kind, config, norms.EXPERTS // norms.LAYOUTS[layout][1])
        self._wanted = {name: norms.place(name, layout) for name, _ in self.layers.named_parameters()}
        self._gradient = norms.gradient
        with torch.no_grad():
            for name, parameter in self.layers.named_parameters():
                parameter.copy_(norms.gradient(f"value of {self._wanted[name]}", parameter.shape))

    def set_input_tensor(self, given: Any) -> None:
        """There is one stage."""

    def forward(self, number: int) -> Any:
        return torch.stack(
            [
                (parameter * self._gradient(f"{number} of {self._wanted[name]}", parameter.shape)).sum()
                for name, parameter in self.layers.named_parameters()
            ]
        ).sum()


class Training:
    """What a script with megatron-core has: model, optimizer, data, and its loop."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self._parallel()
        torch.manual_seed(1)
        self.chunks = {"gpt": self._gpt, "gdn": self._gdn}.get(case.model, self._values)()
        for chunk in self.chunks:
            chunk.config.finalize_model_grads_func = finalize_model_grads if case.finalize else None
        if case.ddp.get("overlap_grad_reduce"):
            calls = [chunk.no_sync for chunk in self.chunks]
            self.chunks[0].config.no_sync_func = calls if len(calls) > 1 else calls[0]
        settings = OptimizerConfig(
            optimizer=case.optimizer,
            lr=case.lr,
            clip_grad=case.clip,
            bf16=case.bf16,
            params_dtype=torch.bfloat16 if case.bf16 else torch.float32,
            use_distributed_optimizer=case.sharded,
        )
        self.optimizer = get_megatron_optimizer(settings, self.chunks)
        batches = self._batches()
        self.iterators = [iter([dict(each) for each in batches]) for _ in self.chunks]

    def _parallel(self) -> None:
        layout = self.case.sizes
        parallel_state.destroy_model_parallel()
        sizes = {
            "tensor_model_parallel_size": layout["TP"],
            "pipeline_model_parallel_size": layout["PP"],
            "context_parallel_size": layout["CP"],
        }
        if layout["EP"] > 1:
            sizes |= {"expert_model_parallel_size": layout["EP"], "expert_tensor_parallel_size": 1}
        if layout["VP"] > 1:
            sizes["virtual_pipeline_model_parallel_size"] = layout["VP"]
        parallel_state.initialize_model_parallel(**sizes)
        model_parallel_cuda_manual_seed(1)

    def _gpt(self) -> list[Any]:
        case, sizes = self.case, self.case.sizes
        names = {"TP": "tensor", "PP": "pipeline", "CP": "context", "EP": "expert", "VP": "chunks"}
        divided = megatron_gpt.Layout(**{name: sizes[each] for each, name in names.items()}, sequence=case.sequence)
        settings: dict[str, Any] = {"calculate_per_token_loss": case.per_token, **case.settings}
        settings["ddp"] = {"use_distributed_optimizer": case.sharded, **case.ddp}
        if divided.context > 1:
            settings |= {"attention": OwnPart, "position": "none"}
        if case.bf16:
            return [small_gpt.make_model(True, **divided.settings, **settings)]
        chunks = megatron_gpt.chunks(divided, "interleaved" if divided.chunks > 1 else "", **settings)
        for name, parameter in megatron_gpt.named(chunks):
            if settings.get("tied") and name == "output_layer.weight":
                megatron_gpt.fill("embedding.word_embeddings.weight", parameter)
        return chunks

    def _gdn(self) -> list[Any]:
        from tests.patches.megatron_core import gdn_norm_gradient_ranks as gdn

        chunk = gdn.make_model(False, None)
        chunk.module.set_input_tensor = lambda given: None
        chunk.module.model_type = ModelType.encoder_or_decoder
        return [chunk]

    def _values(self) -> list[Any]:
        model = Values(self.case.model, self.case.layout)
        ddp = DistributedDataParallelConfig(use_distributed_optimizer=self.case.sharded)
        return [DistributedDataParallel(model.config, ddp, model)]

    def _batches(self) -> list[dict[str, Any]]:
        """Of a data-parallel rank, for three windows."""
        number, generator = self.case.micro_batches * 3, torch.Generator()
        generator.manual_seed(7 + parallel_state.get_data_parallel_rank())
        made: list[dict[str, Any]] = []
        for place in range(number):
            tokens = torch.randint(small_gpt.VOCABULARY, (ROWS, LENGTH + 1), generator=generator)
            counted = torch.rand(ROWS, LENGTH, generator=generator) < (0.6 if self.case.masked else 2)
            counted[:, 0] = True
            if self.case.padded:
                counted = (torch.arange(LENGTH) < LENGTH - 2).expand(ROWS, LENGTH)
            made.append({"tokens": tokens, "counted": counted, "number": place})
        return made

    def forward_step(self, iterator: Iterator[Any], model: Any) -> Any:
        batch = next(iterator)
        if self.case.model == "gdn":
            from tests.patches.megatron_core import gdn_norm_gradient_ranks as gdn

            hidden, weights = gdn.batch(batch["number"])
            return model(hidden), lambda output: ((output * weights).sum(), {})
        if self.case.model != "gpt":
            return model(batch["number"]), lambda output: (output, {})
        tokens, counted = batch.pop("tokens"), part(batch["counted"])  # it changes what the iterator gave
        more = {"padding_mask": part(~batch["counted"])} if self.case.padded else {}
        losses = model(part(tokens[:, :-1]), None, None, labels=part(tokens[:, 1:]), **more)

        def loss_of(output: Any) -> Any:
            total, number = (output.float() * counted).sum(), counted.sum()
            if self.case.per_token or self.case.returns_tokens:
                return total, number.int(), {}
            return total / number, {}

        return losses, loss_of

    def step(self, schedule: Callable[..., Any]) -> Any:
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        schedule(
            forward_step_func=self.forward_step,
            data_iterator=self.iterators if len(self.chunks) > 1 else self.iterators[0],
            model=self.chunks,
            num_microbatches=self.case.micro_batches,
            seq_length=LENGTH,
            micro_batch_size=ROWS,
            forward_only=False,
        )
        if not self.case.finalize:
            finalize_model_grads(self.chunks)
        return self.optimizer.step()


def part(tensor: Any) -> Any:
    """Of a context-parallel rank."""
    number, rank = (getattr(parallel_state, f"get_context_parallel_{of}")() for of in ("world_size", "rank"))
    return tensor.chunk(number, 1)[rank]


# ------------------------------------------------------------------------------------- observations


def rehearsed(name: str, moved: float = 0.0, **more: Any) -> dict[str, Any]:
    """A training's rehearsal, which ends at its first step; from other weights and data if it is moved."""
    training = Training(CASES[name])
    if moved:
        training.iterators = [iter(list(each)[3:]) for each in training.iterators]
        for parameter in training.chunks[0].parameters():
            parameter.data += moved
    found: dict[str, Any] = {}

    def end(of: str, size: str, relations: list[Any]) -> None:
        found.update(name=of, size=size)
        found["relations"] = {each.name: [each.verdict.value, each.measured, each.text] for each in relations}
        found["status"] = start.exit_status(relations)
        raise Ended(0)

    rehearsal, release = MegatronRehearsal(end, goes_on=False, **more), package_info.VERSION
    if name in BREAKING:
        BREAKING[name](training)
    with contextlib.suppress(Ended):
        training.step(lambda **named: rehearsal.schedule(get_forward_backward_func(), named))
    package_info.VERSION = release
    return found


def in_two_layouts(name: str, against: str, folder: Path) -> dict[str, Any]:
    """A training's rehearsal, and the other layout's, which has other weights and data until it is rehearsed."""
    made = [tempfile.mkdtemp(dir=folder)]
    torch.distributed.broadcast_object_list(made)
    of_case = Path(made[0])
    os.environ["RLHF_PATCHES_REHEARSED"] = str(of_case / "results.json")
    results.layout().mkdir(exist_ok=True)
    sizes = settings.layout(against)
    found = rehearsed(name, against=sizes)
    config = model_parallel_config.ModelParallelConfig
    own = parallel_state.initialize_model_parallel, config.__post_init__
    if (results.layout() / results.COMPLETE).exists():
        megatron_layout.wrapped(parallel_state, sizes)
        megatron_layout.wrapped(model_parallel_config, sizes)
        try:
            found["relations"] |= rehearsed(name, 0.3, against=sizes, second=True)["relations"]
        finally:
            parallel_state.initialize_model_parallel, config.__post_init__ = own
    return found


def weights(name: str, path: Path | None, word: str = "go-on") -> list[Any]:
    """Norms and weights of three steps, and the next random number; rehearsed as the environment says if a path."""
    training = Training(CASES[name])
    norms: list[Any] = []
    with rehearsing.armed(path, word) if path is not None else contextlib.nullcontext():
        try:
            norms += [training.step(get_forward_backward_func())[1] for _ in range(3)]
        except SystemExit as ended:
            norms.append(f"status {ended.code}")
    values = [each.detach().double() for chunk in training.chunks for each in chunk.parameters()]
    return [norms, [float(each.sum()).hex() for each in values], float(torch.rand(())).hex()]


def gone_on(name: str, out: Path) -> dict[str, Any]:
    """Whether a run that was rehearsed goes on as if it had not been."""
    path = out / f"results{os.environ['RANK']}.json"
    without, with_it = weights(name, None), weights(name, path)
    found = rehearsing.results(path)
    path.unlink(missing_ok=True)
    (ended,), *_ = weights(name, path, "1")
    path.unlink(missing_ok=True)
    return {"same": without == with_it, "results": found, "ended": ended}


def main() -> None:
    parser = states.parser()
    parser.add_argument("--patch")
    parser.add_argument("--go-on", action="store_true")
    parser.add_argument("--against")
    parser.add_argument("cases", nargs="+")
    options = parser.parse_args()
    torch.compiler.set_stance("force_eager")
    torch.distributed.init_process_group("gloo")
    megatron_gpt.let_experts_run()
    found: dict[str, Any] = {}

    def once(name: str) -> dict[str, Any]:
        return in_two_layouts(name, options.against, options.out) if options.against else rehearsed(name)

    if options.go_on:
        found = {name: gone_on(name, options.out) for name in options.cases}
    else:
        found["without"] = {name: once(name) for name in options.cases}
    if options.patch:
        rlhf_patches.apply(only=options.patch)
        found["status"] = rlhf_patches.report()[options.patch].status.value
        found["with"] = {name: once(name) for name in options.cases}
    (options.out / f"rank{os.environ['RANK']}.json").write_text(json.dumps(found, indent=1))
