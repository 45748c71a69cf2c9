"""In place only when nothing else reads them: whatever holds the logits, in whatever way, finds them as they were.

Each case runs the same loss twice: as it is, and with in place ruled out. The gradients must be the same bit for bit,
what somebody holds must have the values that it had, and the counters must say what was expected.
"""

from __future__ import annotations

import itertools
import threading
import weakref

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from rlhf_patches.patches._vocab_parallel import counters, ownership, softmax
from rlhf_patches.patches._vocab_parallel.entropy import token_entropy
from rlhf_patches.patches._vocab_parallel.logprob import token_logprobs
from tests.harness.token_reference import Source, reference

B, S, V = 2, 5, 17
IN_PLACE = {"backward in place": 1}


def out_of_place(reason, number=1):
    return {f"backward out of place because {reason}": number}


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def dtype(request):
    return request.param


@pytest.fixture
def problem(dtype, monkeypatch):
    monkeypatch.setattr(softmax, "WORK_BYTES", 4 * V * 3)  # three tokens per block: several, and a ragged last one
    return Problem(dtype)


class Problem:
    """A leaf, logits that are twice as large, and the loss's weights."""

    def __init__(self, dtype):
        self.leaf = torch.randn(B, S, V).to(dtype).requires_grad_()
        self.target = torch.randint(-1, V + 1, (B, S))
        self.weights = torch.randn(B, S)

    def loss(self, logits, columns=slice(None)):
        return (token_logprobs(logits, self.target[:, columns], 0, V) * self.weights[:, columns]).sum()

    def gradient(self, columns=slice(None), scale=1.0):
        """The leaf's gradient with in place ruled out: the logits are held."""
        logits = self.leaf * 2
        (found,) = torch.autograd.grad(self.loss(logits[:, columns], columns) * scale, self.leaf)
        assert "backward in place" not in counters.observed()
        counters.reset()
        del logits
        return found

    def taken(self):
        """The leaf's gradient as it has come in."""
        found, self.leaf.grad = self.leaf.grad, None
        return found


def test_a_sole_owner_is_overwritten(problem):
    wanted = problem.gradient()
    problem.loss(problem.leaf * 2).backward()
    assert torch.equal(problem.taken(), wanted)
    assert counters.observed() == IN_PLACE


# ------------------------------------------------------------------------------------- where it has to fire

SHAPES = {
    "upcast": lambda leaf: (leaf * 2).float(),
    "view": lambda leaf: (leaf * 2).view(B, S, V),
    "unpacked and packed": lambda leaf: (leaf * 2).flatten(0, 1).unsqueeze(0).squeeze(0).view(B, S, V),
    "megatron": lambda leaf: (leaf.transpose(0, 1) * 2).transpose(0, 1).contiguous(),
    "transpose": lambda leaf: (leaf.transpose(0, 1) * 2).transpose(0, 1),
    "temperature": lambda leaf: leaf.mul(4).div_(2),
    "temperature of each token": lambda leaf: leaf.mul(4).div_(torch.full((B, S), 2.0).unsqueeze(-1).to(leaf.dtype)),
    "temperature of a view": lambda leaf: leaf.mul(4).unsqueeze(0).squeeze(0).div_(2),
    "upcast and temperature": lambda leaf: leaf.mul(4).float().div_(2),
    "window": lambda leaf: torch.cat([leaf * 2, leaf * 2], dim=1)[:, :S],
    "columns": lambda leaf: torch.cat([leaf * 2, leaf * 2], dim=2)[..., :V],
    "left padding restored": lambda leaf: torch.zeros_like(leaf).index_put((torch.arange(B),), leaf * 2),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_it_fires_for_what_models_produce(problem, shape):
    wanted = problem.gradient()
    problem.loss(SHAPES[shape](problem.leaf)).backward()
    assert torch.equal(problem.taken(), wanted)
    assert counters.observed() == IN_PLACE


def test_a_base_made_in_cpp(problem):
    """No Python object has ever stood for the tensor that these logits view."""
    wanted = problem.gradient(slice(0, 3))
    problem.loss(torch.hsplit(torch.stack([problem.leaf, problem.leaf]).sum(0), [3])[0], slice(0, 3)).backward()
    assert torch.equal(problem.taken(), wanted)
    assert sum(counters.observed().values()) == 1


def test_activation_checkpointing(problem):
    wanted = problem.gradient()
    for reentrant in (False, True):
        checkpoint(lambda leaf: problem.loss(leaf * 2), problem.leaf, use_reentrant=reentrant).backward()
        assert torch.equal(problem.taken(), wanted)
        assert counters.observed() == IN_PLACE
        counters.reset()


def test_hooks_of_ddp_and_of_the_graph(problem):
    wanted, seen = problem.gradient(), []
    problem.leaf.register_post_accumulate_grad_hook(lambda leaf: seen.append(leaf.grad.clone()))
    problem.leaf.expand_as(problem.leaf).grad_fn.next_functions[0][0].register_hook(lambda *_: None)
    logits = problem.leaf * 2
    logits.grad_fn.register_prehook(lambda gradients: seen.append(gradients[0].clone()))
    loss = problem.loss(logits)
    del logits
    loss.backward()
    assert torch.equal(problem.taken(), wanted)
    assert torch.equal(seen[1], wanted)
    assert torch.equal(seen[0] * 2, wanted)
    assert counters.observed() == IN_PLACE


def test_a_hook_on_the_logits_gets_the_gradient(problem):
    wanted, seen = problem.gradient(), []
    logits = problem.leaf * 2
    logits.register_hook(lambda gradient: seen.append(gradient.clone()))
    logits.retain_grad()
    gone = weakref.ref(logits)
    loss = problem.loss(logits)
    del logits
    loss.backward()
    assert torch.equal(problem.taken(), wanted)
    assert torch.equal(seen[0] * 2, wanted)
    assert counters.observed() == IN_PLACE
    assert gone() is None


# ------------------------------------------------------------------------------------- where it must not

# How somebody holds the logits, and what they see there.
HOLDERS = {
    "tensor": (lambda x: x, lambda x: x),
    "container": (lambda x: {"logits": [x]}, lambda x: x["logits"][0]),
    "view": (lambda x: x[:, 1:], lambda x: x),
    "view of a view": (lambda x: x.view(-1)[3:].view(-1, 1), lambda x: x),
    "one element": (lambda x: x[0, 0, 0], lambda x: x),
    "view without grad": (lambda x: torch.no_grad()(lambda: x[0])(), lambda x: x),
    "detached": (lambda x: x.detach(), lambda x: x),
    "view of detached": (lambda x: x.detach()[1], lambda x: x),
    "data": (lambda x: x.data, lambda x: x),
    "as_strided": (lambda x: x.as_strided((2, 2), (1, 1), 5), lambda x: x),
    "bytes": (lambda x: x.detach().view(torch.uint8), lambda x: x),
    "storage": (lambda x: x.untyped_storage(), lambda x: torch.tensor(list(x))),
    "typed storage": (lambda x: x._typed_storage(), lambda x: torch.tensor(list(x._untyped_storage))),
    "dlpack": (lambda x: torch.utils.dlpack.to_dlpack(x.detach()), torch.utils.dlpack.from_dlpack),
    "dlpack tensor": (lambda x: torch.from_dlpack(x.detach()), lambda x: x),
    "set_": (lambda x: torch.empty(0, dtype=x.dtype).set_(x.detach()), lambda x: x),
    "hook": (lambda x: x.register_hook(lambda gradient, seen=x: None), None),
    "graph hook": (lambda x: x.grad_fn.register_prehook(lambda gradient, seen=x: None), None),
}


@pytest.mark.parametrize("through_view", [False, True], ids=["plain", "view"])
@pytest.mark.parametrize("holder", HOLDERS)
def test_whoever_holds_them(problem, holder, through_view):
    wanted = problem.gradient()
    hold, look = HOLDERS[holder]
    logits = problem.leaf * 2
    before = logits.detach().clone()
    held = hold(logits)
    if look is None:  # a closure has them
        alias, expected = weakref.ref(logits), before
    else:
        expected = look(hold(before))
    loss = problem.loss(logits.flatten().view(B, S, V) if through_view else logits)
    del logits
    loss.backward()
    assert torch.equal(problem.taken(), wanted)
    assert "backward in place" not in counters.observed()
    assert sum(counters.observed().values()) == 1
    assert torch.equal(alias() if look is None else look(held), expected)


def test_numpy(problem):
    """Also when the array is gone: nothing tells whether one made of it, without a copy, lives on."""
    if problem.leaf.dtype is torch.bfloat16:
        pytest.skip("NumPy has no bfloat16")
    wanted = problem.gradient()
    for keep in (True, False):
        logits = problem.leaf * 2
        before = logits.detach().clone()
        array = logits.detach().numpy() if keep else logits.detach().numpy().max()
        loss = problem.loss(logits)
        del logits
        loss.backward()
        assert torch.equal(problem.taken(), wanted)
        assert counters.observed() == out_of_place(ownership.FOREIGN)
        counters.reset()
        assert not keep or torch.equal(torch.from_numpy(array), before)


@pytest.mark.parametrize("how", ["numpy", "shared memory"])
def test_memory_that_somebody_else_may_look_into(problem, how):
    if problem.leaf.dtype is torch.bfloat16:
        pytest.skip("NumPy has no bfloat16")
    wanted, arrays = problem.gradient(), []

    def make():
        doubled = problem.leaf.detach() * 2
        if how == "shared memory":
            return doubled.share_memory_()
        arrays.append(doubled.numpy().copy())
        return torch.from_numpy(arrays[0])

    found = []
    problem.loss(Source.apply(torch.zeros(1, requires_grad=True), make, lambda x: found.append(x.clone()))).backward()
    assert torch.equal(found[0] * 2, wanted)
    assert counters.observed() == out_of_place(ownership.FOREIGN)
    for array in arrays:
        assert torch.equal(torch.from_numpy(array), problem.leaf.detach() * 2)


OTHERS = {
    "whole": lambda x: x.square().sum(),
    "window": lambda x: x[:, 1:].square().sum(),
    "view": lambda x: x.view(-1).square().sum(),
    "entropy": lambda x: token_entropy(x).sum(),
    "log-probability": lambda x: token_logprobs(x, torch.zeros(B, S, dtype=torch.long), 0, V).sum(),
}


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("before", [False, True], ids=["afterwards", "before"])
def test_another_function_has_saved_them(problem, other, before):
    """It holds them when our backward is done, and its own backward must be right."""
    wanted = problem.gradient()
    doubled = problem.leaf + problem.leaf  # a graph that saves nothing, so that backward can run through it twice
    (of_other,) = torch.autograd.grad(OTHERS[other](doubled), problem.leaf)
    counters.reset()
    logits = problem.leaf + problem.leaf
    saved = [OTHERS[other](logits)] if before else []
    loss = problem.loss(logits)
    saved += [] if before else [OTHERS[other](logits)]
    del logits
    loss.backward()
    assert torch.equal(problem.taken(), wanted)
    assert counters.observed() == out_of_place(ownership.LOGITS_HELD)
    saved[0].backward()
    assert torch.equal(problem.taken(), of_other)


# What makes the logits may need them in its own backward.
OUTPUT_SAVED = {
    "tanh": lambda leaf: (leaf * 2).tanh(),
    "tanh in place": lambda leaf: (leaf * 2).tanh_(),
    "exp": lambda leaf: (leaf / 4).exp(),
    "sigmoid of a view": lambda leaf: (leaf * 2).sigmoid().view(B, S, V),
    "tanh under a view": lambda leaf: (leaf * 2).unsqueeze(0).tanh_().squeeze(0),
}


@pytest.mark.parametrize("made", OUTPUT_SAVED)
def test_what_has_made_them_has_saved_them(problem, made):
    logits = OUTPUT_SAVED[made](problem.leaf)
    held = logits.detach()  # in place is ruled out
    problem.loss(logits).backward()
    wanted = problem.taken()
    del logits, held
    counters.reset()
    problem.loss(OUTPUT_SAVED[made](problem.leaf)).backward()
    assert torch.equal(problem.taken(), wanted)
    assert counters.observed() == out_of_place(ownership.SHARED)


@pytest.mark.parametrize("before", [False, True], ids=["afterwards", "before"])
@pytest.mark.parametrize("order", [1, -1])
def test_entropy_and_log_probability_in_one_loss(problem, before, order):
    """Two functions, each with the logits saved: the first to run sees the second, which is alone then."""
    a = torch.autograd.grad(problem.loss(problem.leaf * 2), problem.leaf)[0]
    b = torch.autograd.grad(token_entropy(problem.leaf * 2).sum(), problem.leaf)[0]
    counters.reset()
    logits = problem.leaf * 2
    entropy = token_entropy(logits).sum() if before else None
    loss = problem.loss(logits)
    entropy = entropy if before else token_entropy(logits).sum()
    del logits
    sum((loss, entropy)[::order]).backward()
    # Autograd adds the two up before it doubles them, in the logits' dtype; above it was the other way round.
    tolerance = 2 * torch.finfo(problem.leaf.dtype).eps * a.abs().max().item()
    torch.testing.assert_close(problem.taken(), a + b, rtol=0, atol=tolerance)
    assert counters.observed() == {**IN_PLACE, **out_of_place(ownership.LOGITS_HELD)}


def test_the_graph_is_kept(problem):
    wanted = problem.gradient()
    loss = problem.loss(problem.leaf * 2)
    loss.backward(retain_graph=True)
    assert torch.equal(problem.taken(), wanted)
    assert counters.observed() == out_of_place(ownership.KEPT)
    loss.backward()  # the last one may
    assert torch.equal(problem.taken(), wanted)
    assert counters.observed() == {**IN_PLACE, **out_of_place(ownership.KEPT)}
    with pytest.raises(RuntimeError, match="a second time"):
        loss.backward()


def test_create_graph(problem):
    wanted = problem.gradient()
    (found,) = torch.autograd.grad(problem.loss(problem.leaf * 2), problem.leaf, create_graph=True)
    assert torch.equal(found, wanted)
    assert counters.observed() == out_of_place(ownership.KEPT)
    assert not found.requires_grad  # a second derivative is an error, not a wrong number


def test_several_outputs(problem):
    wanted = problem.gradient()
    logits = problem.leaf * 2
    one, two = problem.loss(logits), problem.loss(logits)
    del logits
    (found,) = torch.autograd.grad([one, two], [problem.leaf])
    assert torch.equal(found, wanted * 2)
    assert counters.observed() == {**IN_PLACE, **out_of_place(ownership.LOGITS_HELD)}


def test_gradients_of_the_logits_themselves(problem):
    wanted = problem.gradient()
    logits = problem.leaf * 2
    before = logits.detach().clone()
    of_logits, of_leaf = torch.autograd.grad(problem.loss(logits), [logits, problem.leaf])
    assert torch.equal(of_logits * 2, wanted)
    assert torch.equal(of_leaf, wanted)
    assert torch.equal(logits, before)
    assert counters.observed() == out_of_place(ownership.LOGITS_HELD)


class Subclass(torch.Tensor):
    pass


STATIC = {
    "leaf": (lambda p: p.leaf, ownership.LEAF),
    "view of a leaf": (lambda p: p.leaf.view(B * S, V).view(B, S, V), ownership.LEAF),
    "parameter": (lambda p: torch.nn.Parameter(p.leaf.detach().clone()), ownership.SUBCLASS),
    "subclass": (lambda p: (p.leaf * 2).as_subclass(Subclass), ownership.SUBCLASS),
    "expanded": (lambda p: (p.leaf[:1, :1] * 2).expand(B, S, V), ownership.OVERLAP),
    "as_strided": (lambda p: (p.leaf * 2).as_strided((B, S, V), (S * V - V, V - 1, 1)), ownership.OVERLAP),
}


@pytest.mark.parametrize("case", STATIC)
def test_never_in_place(problem, case):
    make, reason = STATIC[case]
    logits = make(problem)
    before = logits.detach().clone()
    loss = problem.loss(logits)
    owner = logits if logits.is_leaf else logits._base if logits._base is not None and logits._base.is_leaf else None
    values = before.as_subclass(torch.Tensor)
    del logits
    loss.backward()
    if owner is not None:
        assert torch.equal(owner.view(B, S, V), values)
    assert counters.observed() == out_of_place(reason)
    _, _, exact = reference(values, problem.target, problem.weights)
    if owner is problem.leaf:
        tolerance = torch.finfo(values.dtype).eps  # one rounding to the logits' dtype
        torch.testing.assert_close(problem.taken().double(), exact, rtol=tolerance, atol=tolerance)


# ------------------------------------------------------------------------------------- hooks on saved tensors


def test_hooks_that_hand_back_what_they_were_given(problem):
    wanted, packed = problem.gradient(), []

    def pack(tensor):
        packed.append((tensor, tensor.detach().clone()))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = problem.loss(problem.leaf * 2)
    loss.backward()
    assert torch.equal(problem.taken(), wanted)
    assert sum(counters.observed().values()) == 1
    assert "backward in place" not in counters.observed()
    assert all(torch.equal(tensor, before) for tensor, before in packed)


@pytest.mark.parametrize("fresh", [False, True])
def test_hooks_with_a_cache(problem, fresh):
    """What they hand out may still be in the cache. A copy, made for this backward, has no other holder."""
    wanted, cache = problem.gradient(), []

    def pack(tensor):
        cache.append(tensor.detach().clone())
        return len(cache) - 1

    def unpack(index):
        return cache[index].clone() if fresh else cache[index]

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        loss = problem.loss(problem.leaf * 2)
    before = [tensor.clone() for tensor in cache]
    loss.backward()
    assert torch.equal(problem.taken(), wanted)
    assert ("backward in place" in counters.observed()) is fresh
    assert all(map(torch.equal, cache, before))


def test_hooks_put_on_one_saved_tensor_later(problem):
    wanted, kept = problem.gradient(), []
    loss = problem.loss(problem.leaf * 2)
    (node,) = [node for node in graph_of(loss) if type(node).__name__ == "VocabParallelLogprobEntropyBackward"]

    def pack(tensor):
        kept.append((tensor, tensor.clone()))
        return 0

    node._raw_saved_tensors[0].register_hooks(pack, lambda _: kept[0][0])
    del node
    loss.backward()
    assert torch.equal(problem.taken(), wanted)
    assert torch.equal(*kept[0])
    assert "backward in place" not in counters.observed()


def graph_of(tensor):
    nodes = [tensor.grad_fn]
    for node in nodes:
        nodes += [parent for parent, _ in node.next_functions if parent is not None]
    return nodes


def test_offloading(problem):
    wanted = problem.gradient()
    with torch.autograd.graph.save_on_cpu():
        loss = problem.loss(problem.leaf * 2)
    loss.backward(retain_graph=True)
    assert torch.equal(problem.taken(), wanted)
    assert counters.observed() == out_of_place(ownership.KEPT)
    loss.backward()
    assert torch.equal(problem.taken(), wanted)


def test_checkpointed_logits_that_are_seen(problem):
    wanted, seen = problem.gradient(), []

    def run(leaf):
        logits = leaf * 2
        seen.append((logits, logits.detach().clone()))
        return problem.loss(logits)

    for _ in range(2):
        checkpoint(run, problem.leaf, use_reentrant=False).backward()
        assert torch.equal(problem.taken(), wanted)
    assert len(seen) == 4
    assert all(torch.equal(logits, before) for logits, before in seen)
    assert "backward in place" not in counters.observed()


def test_checkpointed_logits_that_another_function_saves(problem):
    def run(leaf):
        logits = leaf * 2
        return problem.loss(logits) + logits.square().sum()

    run(problem.leaf).backward()
    wanted = problem.taken()
    checkpoint(run, problem.leaf, use_reentrant=False).backward()
    assert torch.equal(problem.taken(), wanted)


# ------------------------------------------------------------------------------------- threads, and strange builds


def test_another_thread_holds_them(problem):
    wanted, seen = problem.gradient(), []
    ready, go = threading.Event(), threading.Event()

    def holder(held):
        ready.set()
        go.wait()
        seen.append(held.detach().clone())

    logits = problem.leaf * 2
    before = logits.detach().clone()
    thread = threading.Thread(target=holder, args=(logits,))
    thread.start()
    ready.wait()
    loss = problem.loss(logits)
    del logits
    loss.backward()
    go.set()
    thread.join()
    assert torch.equal(seen[0], before)
    assert torch.equal(problem.taken(), wanted)
    assert counters.observed() == out_of_place(ownership.LOGITS_HELD)


def test_many_threads_at_once(problem):
    ownership._lowest_counts.cache_clear()
    wanted, found = problem.gradient(), []

    def train():
        for _ in range(20):
            (gradient,) = torch.autograd.grad(problem.loss(problem.leaf * 2), problem.leaf)
            found.append(torch.equal(gradient, wanted))

    threads = [threading.Thread(target=train) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 80
    assert counters.observed() == {"backward in place": 80}


def test_calibration_runs_apart_from_the_caller():
    """Under whatever the first caller has in force."""
    plain = ownership._lowest_counts()
    assert plain is not None
    ownership._lowest_counts.cache_clear()
    with torch.inference_mode(), torch.autograd.graph.saved_tensors_hooks(lambda x: 1 / 0, lambda x: 1 / 0):
        assert ownership._lowest_counts() == plain


CALLS = itertools.count()
BUILDS = {
    "no such function": None,
    "always one": lambda storage: 1,
    "holders do not show": lambda storage: 2,
    "something else": lambda storage: next(CALLS),
    "downwards": lambda storage, count=torch._C._storage_Use_Count: 100 - count(storage),
}


@pytest.mark.parametrize("build", BUILDS)
def test_a_torch_build_with_other_counts(problem, build, monkeypatch):
    wanted = problem.gradient()
    if BUILDS[build] is None:
        monkeypatch.delattr(torch._C, "_storage_Use_Count")
    else:
        monkeypatch.setattr(torch._C, "_storage_Use_Count", BUILDS[build])
    ownership._lowest_counts.cache_clear()
    try:
        problem.loss(problem.leaf * 2).backward()
    finally:
        ownership._lowest_counts.cache_clear()
    assert torch.equal(problem.taken(), wanted)
    assert counters.observed() == out_of_place(ownership.UNPROVEN)


# ------------------------------------------------------------------------------------- what autograd hands on


def test_the_gradient_is_an_alias(problem):
    """Not the tensor that was saved: that one has a graph, and autograd lets go of it."""
    seen = []
    logits = problem.leaf * 2
    address = logits.data_ptr()
    logits.grad_fn.register_prehook(lambda gradients: seen.append(gradients[0]))
    loss = problem.loss(logits)
    del logits
    loss.backward()
    assert seen[0].data_ptr() == address
    assert seen[0].grad_fn is None
    assert seen[0].dtype is problem.leaf.dtype
