"""Small reproductions of the silent errors on which TrainCheck (OSDI 2025) was measured, each faulty and right.

Its cases are at github.com/OrderLab/TrainCheck-Evaluation-Workloads; these are written anew, for a CPU and seconds. The
name of a case is that of the upstream issue. Two of the paper's cases are not in that repository: accelerate-2665 and
transformers-29903.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import distributed, nn
from torch.nn.functional import cross_entropy, dropout
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from tests.patches.accelerate.loops_made import model, plainly, rows


@dataclass(frozen=True)
class Case:
    """A case.

    Args:
        loop: trains; it is given whether it is the faulty version.
        relation: the relation that sees the fault; empty if none does.
        verdict: "deviates", or "note": then the exit status is 0.
        ranks: the number of processes.
        why_not: why no relation sees it.
    """

    loop: Callable[[bool], Any]
    relation: str = ""
    verdict: str = "deviates"
    ranks: int = 1
    why_not: str = ""


CASES: dict[str, Case] = {}


def case(name: str, relation: str = "", **more: Any) -> Callable[[Callable[[bool], Any]], Callable[[bool], Any]]:
    def noted(loop: Callable[[bool], Any]) -> Callable[[bool], Any]:
        CASES[name] = Case(loop, relation, **more)
        return loop

    return noted


def trained(net: nn.Module, parameters: Any = None, each_step: Callable[[], Any] = lambda: None) -> nn.Module:
    given = net.parameters() if parameters is None else parameters
    return plainly(net, torch.optim.SGD(given, lr=0.1, momentum=0.9), each_step)


# -- a user's own code


@case("stackoverflow-60335387", "gradient used")
def zero_grad_is_missing(faulty: bool) -> Any:
    net = model()
    optimizer = torch.optim.Adam(net.parameters())
    for x, y in rows():
        if not faulty:
            optimizer.zero_grad()
        cross_entropy(net(x), y).backward()
        optimizer.step()
    return net


@case("pytorch-forum-84911", "optimizer parameters")
def the_optimizers_parameters_are_frozen(faulty: bool) -> Any:
    net = model(norm=True)
    optimizer = torch.optim.Adam(net[4].parameters(), lr=0.001)
    for name, each in net.named_parameters():
        each.requires_grad_(name.startswith("1") or (name.startswith("4") and not faulty))
    return plainly(net, optimizer)


@case("x-jxmnop-ddp-out-of-sync", "gradient used", ranks=2)
def the_loss_goes_around_ddp(faulty: bool) -> Any:
    net = model()
    wrapped = DistributedDataParallel(net)
    return trained(net if faulty else wrapped)


@case("stackoverflow-67180955", "data loader workers")
def workers_share_their_random_numbers(faulty: bool) -> Any:
    class Noisy(Dataset[Any]):
        def __len__(self) -> int:
            return 64

        def __getitem__(self, place: int) -> Any:
            return torch.as_tensor(numpy.random.randn(8), dtype=torch.float32), place % 3

    def same_seed(_: int) -> None:
        numpy.random.seed(0)

    net = model()
    optimizer = torch.optim.Adam(net.parameters())
    loader = DataLoader(Noisy(), 4, num_workers=2, worker_init_fn=same_seed if faulty else None)
    for x, y in loader:
        optimizer.zero_grad()
        cross_entropy(net(x), y).backward()
        optimizer.step()
    return net


# -- frameworks


@case("pytorch-104336", "gradient used", ranks=2)
def parameters_move_after_ddp(faulty: bool) -> Any:
    """As a move to another device and back: new parameters, on which DistributedDataParallel has no hooks."""
    net = model()
    wrapped = DistributedDataParallel(net)
    if faulty:
        for module in net.modules():
            for name, each in [*module.named_parameters(recurse=False)]:
                setattr(module, name, nn.Parameter(each.detach().clone()))
    return trained(wrapped)


@case("deepspeed-1801", "gradient across ranks", ranks=2)
def one_rank_alone_clips(faulty: bool) -> Any:
    """Clipping leaves replicated parameters out on all ranks but the first of a tensor-parallel group."""
    net = model()
    wrapped = DistributedDataParallel(net)

    def clip() -> None:
        every = [*net.parameters()]
        norm = torch.cat([each.grad.reshape(-1) for each in every]).norm()
        for each in every:
            if not faulty or each.dim() > 1 or distributed.get_rank() == 0:
                each.grad *= 0.1 / norm

    return trained(wrapped, None, clip)


@case("accelerate-2665", "optimizer parameters")
def the_optimizer_is_older_than_the_wrapping(faulty: bool) -> Any:
    """As FSDP, which makes flat parameters."""

    class Wrapped(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self._sizes = {name: each.shape for name, each in inner.named_parameters()}
            self.flat = nn.Parameter(torch.cat([each.detach().reshape(-1) for each in inner.parameters()]))
            for module in inner.modules():
                for name in [name for name, _ in module.named_parameters(recurse=False)]:
                    delattr(module, name)
            self._inner = [inner]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            parts = self.flat.split([size.numel() for size in self._sizes.values()])
            for (name, size), part in zip(self._sizes.items(), parts, strict=True):
                place, _, own = name.rpartition(".")
                setattr(self._inner[0].get_submodule(place), own, part.view(size))
            return self._inner[0](x)

    net = model(dropout=0.0)
    before = [*net.parameters()]
    wrapped = Wrapped(net)
    return trained(wrapped, before if faulty else wrapped.parameters())


@case("mmpretrain-702", "training mode")
def layers_are_frozen_in_train_only(faulty: bool) -> Any:
    class Net(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(*model())
            if not faulty:
                self._freeze()

        def _freeze(self) -> None:
            self[0].requires_grad_(False)

        def train(self, mode: bool = True) -> Any:
            super().train(mode)
            self._freeze()
            return self

    return trained(Net())


@case("transformers-33844", "evaluation mode")
def dropout_in_evaluation(faulty: bool) -> Any:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dropout, self.inward = 0.1, nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return dropout(self.inward(x), self.dropout if faulty or self.training else 0.0)

    return trained(nn.Sequential(Attention(), nn.Linear(8, 3)))


@case("transformers-34204", "rows of a batch")
def a_processor_joins_the_batch(faulty: bool) -> Any:
    generator = torch.Generator().manual_seed(0)
    examples = [(torch.randint(0, 16, (3,), generator=generator), place % 3) for place in range(64)]

    def collate(given: Any) -> dict[str, torch.Tensor]:
        tokens = [each for each, _ in given]
        ids = torch.cat(tokens)[None] if faulty else torch.stack(tokens)
        return {"input_ids": ids, "labels": torch.tensor([label for _, label in given])}

    net = nn.ModuleList([nn.Embedding(16, 8), nn.Linear(8, 3)])
    optimizer = torch.optim.Adam(net.parameters())
    loader = DataLoader(examples, 4, collate_fn=collate)
    for batch in loader:
        optimizer.zero_grad()
        scores = net[1](net[0](batch["input_ids"]).mean(1))
        cross_entropy(scores.expand(4, 3), batch["labels"]).backward()
        optimizer.step()
    return net


@case("transformers-23723", "generated tokens")
def more_tokens_than_asked_for(faulty: bool) -> Any:
    """The limit is counted from a prompt before it is cut to what the model takes."""
    import transformers

    class Prompted(transformers.GPT2LMHeadModel):
        def generate(self, prompt: torch.Tensor, *, max_new_tokens: int, **more: Any) -> Any:
            cut = prompt[:, -6:]
            limit = max_new_tokens + (prompt.shape[1] - cut.shape[1] if faulty else 0)
            made = super().generate(cut, max_new_tokens=limit, do_sample=False, **more)
            return torch.cat([prompt[:, :-6], made], 1)

    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "bos_token_id": None, "eos_token_id": None, "n_positions": 64}
    net = Prompted(transformers.GPT2Config(vocab_size=32, **sizes)).train()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    for _ in range(4):
        tokens = torch.randint(0, 32, (2, 10))
        optimizer.zero_grad()
        net(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        net.generate(tokens, max_new_tokens=3, attention_mask=torch.ones(2, 6), pad_token_id=0)
    return net


@case("transformers-29903", "checkpoint")
def the_checkpoint_lacks_what_was_trained(faulty: bool) -> Any:
    """The file gets zeros in place of a tensor. With --save."""
    import transformers

    write = transformers.modeling_utils.safe_save_file

    def loses_one(tensors: dict[str, torch.Tensor], *given: Any, **named: Any) -> None:
        last = [*tensors][-1]
        write({**tensors, last: torch.zeros_like(tensors[last])}, *given, **named)

    if faulty:
        transformers.modeling_utils.safe_save_file = loses_one
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    net = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=32, pad_token_id=0, **sizes))
    tokens = [torch.randint(1, 32, (6,)) for _ in range(32)]
    rows_of_tokens = [{"input_ids": each, "labels": each} for each in tokens]
    args = transformers.TrainingArguments(
        "trained",
        per_device_train_batch_size=2,
        max_steps=2,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    return transformers.Trainer(net, args, train_dataset=rows_of_tokens)


@case("deepspeed-5794", why_not="ranks of an expert group exchange unequally: a hang, before any step")
def unequal_exchanges(faulty: bool) -> Any:
    """Not reproduced: both versions are right."""
    return trained(model())


@case("transformers-17877", why_not="modules are initialized several times: right weights, a slow start")
def initialized_again_and_again(faulty: bool) -> Any:
    net = model()
    for _ in range(3 if faulty else 1):
        net.apply(lambda each: nn.init.normal_(each.weight, std=0.1) if isinstance(each, nn.Linear) else None)
    return trained(net)


@case("pytorch-51800", why_not="a weight that is normalized only in a forward pass: training is right")
def a_weight_before_the_first_forward_pass(faulty: bool) -> Any:
    net = model()
    net[0] = nn.utils.spectral_norm(net[0])
    if not faulty:
        net(torch.zeros(2, 8))
    return trained(net)


# -- compilers


@case("pytorch-115607", "optimizer step")
def a_compiled_step_keeps_its_first_list(faulty: bool) -> Any:
    """As a step that was traced while some gradients were None."""
    net = model()
    optimizer = torch.optim.Adam(net.parameters())
    if faulty:
        lists: list[Any] = []
        own = optimizer._init_group

        def traced(group: Any, *given: Any) -> Any:
            if not lists:
                lists.append([each for each in group["params"] if each.grad is not None])
            return own({**group, "params": lists[0]}, *given)

        optimizer._init_group = traced
    for place, (x, y) in enumerate(rows()):
        optimizer.zero_grad()
        net[0].requires_grad_(place > 0)
        cross_entropy(net(x), y).backward()
        optimizer.step()
    return net


@case("lightning-thunder-725", "autocast")
def autocast_passes_by(faulty: bool) -> Any:
    """As a compiled function in which autocast no longer reaches the linear layers."""
    net = model()
    optimizer = torch.optim.Adam(net.parameters())
    for x, y in rows():
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            if faulty:
                with torch.autocast("cpu", enabled=False):
                    made = net(x)
            else:
                made = net(x)
        cross_entropy(made.float(), y).backward()
        optimizer.step()
    return net


# -- hardware and drivers: transfers that lose data


def loses(tensor: torch.Tensor, faulty: bool) -> None:
    """A tensor that arrives as zeros on the second rank."""
    if faulty and distributed.get_rank() == 1:
        tensor.zero_()


@case("pytorch-84803", "gradient across ranks", ranks=2)
def a_reduction_loses_data(faulty: bool) -> Any:
    net = model()
    for each in net.parameters():
        distributed.broadcast(each.data, 0)

    def reduce() -> None:
        for place, each in enumerate(net.parameters()):
            distributed.all_reduce(each.grad)
            each.grad /= distributed.get_world_size()
            loses(each.grad, faulty and place == 2)

    return trained(net, None, reduce)


@case("pytorch-96600", "parameters across ranks", ranks=2)
def a_broadcast_loses_data(faulty: bool) -> Any:
    net = model()
    wrapped = DistributedDataParallel(net)
    loses(net[4].weight.data, faulty)
    return trained(wrapped)


@case("baichuan2-86", "evaluation mode", verdict="note")
def a_copy_to_the_other_device_loses_data(faulty: bool) -> Any:
    """A model over two devices."""

    class Over(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 3)
            self._copies = [0]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            made = self.first(x)
            self._copies[0] += 1
            return self.second(made * 0 if faulty and self._copies[0] % 5 == 0 else made)

    return trained(copy.deepcopy(Over()))
