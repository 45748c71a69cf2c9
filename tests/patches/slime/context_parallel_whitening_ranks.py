"""Advantages that slime whitens on data- and context-parallel ranks, against the same in float64 over whole sequences.

``--out FOLDER [CONTEXT]`` on gloo ranks, with slime's files of one tag on sys.path, or the stand-in for them
(tests/harness/standins/slime_loss). Before it communicates for true, a case is run with a collective that only notes
who calls it: where a member of the group does not, the others would wait for ever, and it is not run for true.
"""

from __future__ import annotations

import importlib
import statistics
from types import SimpleNamespace
from typing import Any

import torch

from rlhf_patches.proving import states
from tests.harness import megatron_on_cpu, slime_clone

torch.set_num_threads(1)
megatron_on_cpu.install()
slime_clone.install()

from megatron.core import parallel_state

NAME = "slime-context-parallel-whitening"
Samples = list[tuple[int, int, float]]
# Of each data-parallel rank the samples: total and response length, and reward.
CASES: dict[str, list[Samples]] = {
    "long": [[(16, 11, 1.0), (23, 20, -0.4), (9, 5, 0.2)], [(31, 17, 0.1), (12, 3, -1.5), (8, 7, 0.6)]],
    # The second data-parallel rank's responses end within a chunk of its first context-parallel rank.
    "short": [[(16, 11, 1.0), (23, 20, -0.4)], [(40, 3, 0.7), (36, 2, -1.0)]],
    "nothing": [[(16, 0, 1.0)], [(20, 0, -0.4)]],
}


def mask(response: int) -> torch.Tensor:
    """Each fourth token is a tool's; never the last one."""
    return torch.tensor([1 if (response - at) % 4 != 3 else 0 for at in range(response)])


def own(total: int, response: int, context: int) -> list[int]:
    """Positions within the response of this rank's tokens, by the definition: two chunks, mirrored, one ahead."""
    rank, prompt = parallel_state.get_context_parallel_rank(), total - response
    size = -(-total // (2 * context))
    chunks = {rank, 2 * context - 1 - rank}
    return [at for at in range(response) if context == 1 or (prompt + at - 1) // size in chunks]


def whitened(case: str) -> list[list[list[float]]]:
    """Of each data-parallel rank each response's advantages, in float64."""
    counted = [reward for rank in CASES[case] for _, response, reward in rank for one in mask(response).tolist() if one]
    if not counted:
        return [[[] for _ in rank] for rank in CASES[case]]
    mean, variance = statistics.fmean(counted), statistics.variance(counted)
    return [
        [[(reward - mean) / (variance + 1e-8) ** 0.5] * response for _, response, reward in rank]
        for rank in CASES[case]
    ]


def call(case: str, context: int, normalize: bool = True) -> list[torch.Tensor]:
    samples = CASES[case][parallel_state.get_data_parallel_rank()]
    data: dict[str, Any] = {
        "log_probs": [torch.zeros(len(own(total, response, context))) for total, response, _ in samples],
        "rewards": [reward for *_, reward in samples],
        "total_lengths": [total for total, *_ in samples],
        "response_lengths": [response for _, response, _ in samples],
        "loss_masks": [mask(response).int() for _, response, _ in samples],
    }
    args = SimpleNamespace(
        **{"normalize_advantages": normalize, "advantage_estimator": "grpo", "kl_coef": 0, "use_opd": False},
        **{"use_rollout_logprobs": False, "custom_advantage_function_path": None, "qkv_format": "thd"},
        context_parallel_size=context,
    )
    importlib.import_module("slime.backends.megatron_utils.loss").compute_advantages_and_returns(args, data)
    found: list[torch.Tensor] = data["advantages"]
    return found


def waiting(case: str, context: int) -> list[int]:
    """Ranks that would wait for ever: members of a group that not all members enter."""
    mine: list[list[int]] = []
    release = torch.distributed.all_reduce

    def noting(tensor: torch.Tensor, group: Any = None, **_: Any) -> None:
        mine.append(torch.distributed.get_process_group_ranks(group))
        tensor.fill_(1)  # as if there was something

    torch.distributed.all_reduce = noting
    try:
        call(case, context)
    finally:
        torch.distributed.all_reduce = release
    every: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(every, mine)
    return [rank for rank, groups in enumerate(every) for group in groups if any(group not in every[i] for i in group)]


def observe(context: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for case in CASES:
        found[case] = {"waiting": waiting(case, context)}
        if found[case]["waiting"]:
            continue
        try:
            advantages = call(case, context)
        except ValueError as error:  # main, where no rank has a token
            found[case]["error"] = str(error)
            continue
        exact = whitened(case)[parallel_state.get_data_parallel_rank()]
        off, signs, count = 0.0, 0, 0
        for one, (total, response, _), whole in zip(
            advantages, CASES[case][parallel_state.get_data_parallel_rank()], exact, strict=True
        ):
            places = own(total, response, context)
            assert len(one) == len(places)
            for value, at in zip(one.tolist(), places, strict=True):
                off, signs, count = max(off, abs(value - whole[at])), signs + (value * whole[at] < 0), count + 1
        found[case].update(
            off=off, signs=signs, tokens=count, advantages=[value for one in advantages for value in one.tolist()]
        )
    found["without"] = [value for one in call("long", context, normalize=False) for value in one.tolist()]
    return found


def main() -> None:
    parser = states.parser()
    parser.add_argument("context", nargs="?", type=int, default=2)
    options = parser.parse_args()
    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel(context_parallel_size=options.context)
    importlib.import_module("slime.backends.megatron_utils.loss")
    states.report(NAME, lambda: observe(options.context), options.out)
