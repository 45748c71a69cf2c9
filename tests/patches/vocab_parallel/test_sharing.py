"""Log-probabilities and entropies of the same logits in one pass, and when that must not be."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from rlhf_patches.patches._vocab_parallel import counters, shared, softmax, upstream
from rlhf_patches.patches._vocab_parallel.entropy import token_entropy
from rlhf_patches.patches._vocab_parallel.logprob import token_logprobs
from tests.harness.token_reference import made, reference

B, S, V = 3, 7, 23
ONE_PASS = {"backward in place": 1}


@pytest.fixture
def passes(monkeypatch):
    """How many times the logits are gone through forward."""
    original, calls = softmax.VocabParallelLogprobEntropy.forward, []

    def forward(ctx, *args):
        calls.append(None)  # not the arguments: that would be holding the logits
        return original(ctx, *args)

    monkeypatch.setattr(softmax.VocabParallelLogprobEntropy, "forward", staticmethod(forward))
    return calls


@pytest.fixture
def problem():
    return Problem()


class Problem:
    def __init__(self):
        self.values, self.target = torch.randn(B, S, V) * 3, torch.randint(0, V, (B, S))
        self.weights, self.found = torch.randn(B, S), []

    def logits(self):
        return made(self.values, lambda gradient: self.found.append(gradient.clone()))

    def log_probs(self, logits):
        return token_logprobs(logits, self.target.view(logits.shape[:-1]), 0, V, with_entropy=True)

    def check(self, of_entropy=None):
        _, _, exact = reference(self.values, self.target, self.weights, of_entropy)
        # float32 arithmetic; weights and z go up to 4 and 20.
        torch.testing.assert_close(sum(self.found).view(B, S, V).double(), exact, rtol=0, atol=1e-5)


# What SkyRL passes: the logits themselves, the window of the actions, and the packed path's views.
WINDOWS = {
    "whole": (lambda x: x, lambda x: x, (slice(None), slice(None))),
    "actions": (lambda x: x, lambda x: x[:, -4:-1, :], (slice(None), slice(-4, -1))),
    "batch and actions": (lambda x: x, lambda x: x[1:, :3], (slice(1, None), slice(0, 3))),
    "one sequence": (lambda x: x, lambda x: x[1:2], (slice(1, 2), slice(None))),
    "one token": (lambda x: x, lambda x: x[:1, 6:], (slice(0, 1), slice(6, None))),
    "log-probabilities of a view": (
        lambda x: x.view(1, B * S, V).squeeze(0).unsqueeze(0),
        lambda x: x.view(1, B * S, V),
        (slice(None), slice(None)),
    ),
    "transposed": (lambda x: x.transpose(0, 1), lambda x: x.transpose(0, 1)[2:4], (slice(None), slice(2, 4))),
}


@pytest.mark.parametrize("case", WINDOWS)
@pytest.mark.parametrize("grad", [True, False], ids=["in the loss", "only looked at"])
def test_one_pass(problem, passes, case, grad):
    first, second, (sequences, tokens) = WINDOWS[case]
    logits = problem.logits()
    view = first(logits)
    if case == "transposed":
        log_probs = token_logprobs(view, problem.target.T, 0, V, with_entropy=True).T
    else:
        log_probs = problem.log_probs(view).view(B, S)
    del view
    with torch.set_grad_enabled(grad):
        entropy = token_entropy(second(logits))
    assert len(passes) == 1
    _, exact, _ = reference(problem.values, problem.target, problem.weights)
    shaped = exact[sequences, tokens]
    shaped = shaped.T if case == "transposed" else shaped.reshape(entropy.shape)
    torch.testing.assert_close(entropy.double(), shaped, rtol=0, atol=1e-5)
    assert entropy.requires_grad is grad
    of_entropy = torch.zeros(B, S)
    loss = (log_probs * problem.weights).sum()
    if grad:
        of_entropy[sequences, tokens] = 1.0
        loss = loss + entropy.sum()
    del logits
    loss.backward()
    problem.check(of_entropy)
    assert counters.observed() == ONE_PASS
    assert len(passes) == 1


def test_only_the_entropy_is_in_the_loss(problem, passes):
    logits = problem.logits()
    log_probs = problem.log_probs(logits)
    entropy = token_entropy(logits)
    del logits
    entropy.sum().backward()
    problem.weights.zero_()
    problem.check(torch.ones(B, S))
    assert counters.observed() == ONE_PASS
    del log_probs


def test_twice(problem, passes):
    logits = problem.logits()
    loss = (problem.log_probs(logits) * problem.weights).sum()
    loss = loss + token_entropy(logits).sum() + token_entropy(logits).sum()
    del logits
    loss.backward()
    problem.check(torch.full((B, S), 2.0))
    assert (len(passes), counters.observed()) == (1, ONE_PASS)


# What must be computed afresh, because it is something else or because its gradient goes another way.
AFRESH = {
    "modified": lambda x: x.mul_(2.0),
    "modified through a view": lambda x: (x[0].add_(1.0), x)[1],
    "a copy": lambda x: x.clone(),
    "detached leaf": lambda x: x.detach().requires_grad_(),
    "half the vocabulary": lambda x: x[..., : V // 2],
    "every second": lambda x: x[:, ::2],
    "other strides": lambda x: x.view(B * S, V),
    "flattened with an overlap": lambda x: x.view(-1)[1 : 1 + (B - 1) * S * V].view(B - 1, S, V),
    "hook": lambda x: (y := x[:, 1:], y.register_hook(lambda gradient: gradient * 0))[0],
    "retained": lambda x: (y := x[:, 1:], y.retain_grad())[0],
}


@pytest.mark.parametrize("case", AFRESH)
def test_something_else_is_computed_afresh(problem, passes, case):
    logits = problem.logits()
    log_probs = problem.log_probs(logits)
    other = AFRESH[case](logits)
    entropy = token_entropy(other)
    assert len(passes) == 2
    log_p = other.detach().double().log_softmax(-1)
    torch.testing.assert_close(entropy.double(), -(log_p.exp() * log_p).sum(-1), rtol=0, atol=1e-5)
    del log_probs


def test_detached_logits_give_no_gradient(problem, passes):
    logits = problem.logits()
    log_probs = problem.log_probs(logits)
    assert not token_entropy(logits.detach()).requires_grad
    with torch.no_grad():
        assert not token_entropy(logits).requires_grad
    assert not token_entropy(logits, inference_only=True).requires_grad
    leaf = logits.detach().requires_grad_()
    token_entropy(leaf).sum().backward()
    assert leaf.grad is not None
    assert not problem.found
    del log_probs


def without_grad(make):
    with torch.no_grad():
        return make()


@pytest.mark.parametrize("again", [False, True], ids=["a view without grad", "a view of one"])
@pytest.mark.parametrize("which", ["entropy", "log-probability"])
def test_views_made_without_grad_are_cut_off(problem, again, which):
    """torch lets them require a gradient, which goes nowhere; and that of the logits themselves must not get lost."""
    logits = problem.logits()
    cut = without_grad(lambda: logits[:, 1:] if which == "entropy" else logits[:])
    part = cut[:, :] if again else cut
    log_probs = problem.log_probs(logits if which == "entropy" else part)
    token_entropy(part if which == "entropy" else logits).sum().backward()
    assert cut.grad is None
    assert len(problem.found) == (which == "log-probability")
    del log_probs


def test_another_group_is_another_result(problem, passes):
    logits = problem.logits()
    log_probs = problem.log_probs(logits)
    assert shared.recall(logits, None) is not None
    assert shared.recall(logits, object()) is None
    del log_probs


def test_not_in_another_thread(problem):
    logits, found = problem.logits(), []
    log_probs = problem.log_probs(logits)
    thread = threading.Thread(target=lambda: found.append(shared.recall(logits, None)))
    thread.start()
    thread.join()
    assert found == [None]
    del log_probs


def test_nothing_lives_longer_than_the_callers_graph(problem):
    """The logits go with the log-probabilities, without a backward and without the garbage collector."""
    gc.disable()
    try:
        logits = problem.logits()
        gone = weakref.ref(logits)
        log_probs = problem.log_probs(logits)
        entropy = token_entropy(logits)
        del logits
        assert gone() is not None
        del log_probs
        assert gone() is not None
        del entropy
        assert gone() is None
        logits = problem.logits()
        gone = weakref.ref(logits)
        action_log_probs = problem.log_probs(logits)[:, 1:].sum()
        assert token_entropy(logits).requires_grad
        del logits, action_log_probs
        assert gone() is None
    finally:
        gc.enable()


def test_forgotten_with_the_log_probabilities(problem, passes):
    logits = problem.logits()
    problem.log_probs(logits)
    token_entropy(logits)
    assert len(passes) == 2


def test_after_backward_it_is_computed_afresh(problem, passes):
    """The graph is gone; a gradient through it would be an error."""
    logits = problem.logits()
    log_probs = problem.log_probs(logits)
    log_probs.sum().backward(retain_graph=True)
    assert token_entropy(logits).requires_grad
    token_entropy(logits).sum().backward()
    del log_probs


def test_log_probabilities_may_be_changed_in_place(problem):
    """As those that upstream returns: no view of something that a custom function has made."""
    log_probs = problem.log_probs(problem.logits())
    (log_probs.mul_(2.0) * problem.weights).sum().backward()
    problem.weights *= 2
    problem.check()


@pytest.mark.parametrize("grad", [True, False], ids=["in the loss", "only looked at"])
@pytest.mark.parametrize("known", [True, False], ids=["remembered", "computed afresh"])
def test_entropies_may_be_changed_in_place(problem, known, grad):
    """They are the caller's own, and what the next call returns is another tensor."""
    logits = problem.logits()
    log_probs = problem.log_probs(logits) if known else None
    with torch.set_grad_enabled(grad):
        entropy = token_entropy(logits[:, 1:])
        before = entropy.detach().clone()
        entropy.mul_(3.0)
        assert torch.equal(token_entropy(logits[:, 1:]), before)
    assert torch.equal(entropy, before * 3)
    if grad:
        of_entropy = torch.full((B, S), 3.0)
        of_entropy[:, 0] = 0
        problem.weights.zero_()
        entropy.sum().backward()
        problem.check(of_entropy)
    del log_probs


@pytest.mark.parametrize("name", ["distributed", "chunked", "entropy"])
def test_results_of_the_functions_may_be_changed_in_place(problem, name):
    """Those that stand in for SkyRL's and NeMo-RL's: what they return is no view."""
    target = problem.target
    forward, backward = {
        "distributed": (
            lambda *of: upstream.around_forward(None, None, (*of, target, 0, V, None, False), {}),
            upstream.backward,
        ),
        "chunked": (
            lambda *of: upstream.around_chunked_forward(None, None, (*of, target, 0, V, 2, None, False), {}),
            upstream.backward,
        ),
        "entropy": (lambda *of: upstream.entropy_forward(*of, None), lambda *of: (upstream.entropy_backward(*of),)),
    }[name]

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, logits):
            return forward(ctx, logits)

        @staticmethod
        def backward(ctx, gradient):
            return backward(ctx, gradient)[0]

    found = Function.apply(problem.logits())
    (found.mul_(2.0) * problem.weights).sum().backward()
    of_entropy = 2 * problem.weights if name == "entropy" else None
    problem.weights = problem.weights * (0 if name == "entropy" else 2)
    problem.check(of_entropy)


@pytest.mark.parametrize("before", [False, True], ids=["asked for afterwards", "asked for before"])
def test_one_backward_after_the_other(problem, before):
    """Of logits below which no graph is used up; as two functions of their own do it."""
    leaf = problem.values.clone().requires_grad_()
    for logits in (leaf, leaf + 0):
        if before and logits is not leaf:
            continue  # they have one backward: docs/logprob-in-place.md, Limits
        leaf.grad = None
        log_probs = problem.log_probs(logits)
        entropy = token_entropy(logits) if before else None
        (log_probs * problem.weights).sum().backward()
        entropy = entropy if before else token_entropy(logits)
        entropy.sum().backward()
        problem.found = [leaf.grad]
        problem.check(torch.ones(B, S))


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(problem, reentrant):
    def run(leaf):
        logits = leaf * 1
        return (problem.log_probs(logits) * problem.weights).sum() + token_entropy(logits).sum()

    leaf = problem.values.clone().requires_grad_()
    checkpoint(run, leaf, use_reentrant=reentrant).backward()
    problem.found.append(leaf.grad)
    problem.check(torch.ones(B, S))
    assert counters.observed() == ONE_PASS


def test_microbatches_in_turn(problem):
    """Two graphs alive at once, as in a pipeline: each finds its own."""
    other = Problem()
    losses = []
    for one in (problem, other):
        logits = one.logits()
        losses.append((one.log_probs(logits) * one.weights).sum() + token_entropy(logits[:, 2:]).sum())
        del logits
    for loss in losses:
        loss.backward()
    of_entropy = torch.ones(B, S)
    of_entropy[:, :2] = 0
    problem.check(of_entropy)
    other.check(of_entropy)
    assert counters.observed() == {"backward in place": 2}
