"""transformers-packed-linear-attention: packed rows of tiny models, against their documents alone in float64."""

from __future__ import annotations

import importlib
import itertools

import pytest

import rlhf_patches
from tests.harness.by_case import States, exhaustive_but
from tests.harness.forkserver import beside

NAME = "transformers-packed-linear-attention"
WORKER = "rlhf_patches.patches.transformers.proofs.packed_linear_attention_ranks"
MODELING = "transformers.models.qwen3_next.modeling_qwen3_next"
MODELS = ("Qwen3Next", "Qwen3_5", "Qwen3_5Moe", "OlmoHybrid")
WRONG = ("packed", "2 rows", "long", "checkpointed", "reentrant")
LEFT = ("a mask", "not packed", "no positions", "other jumps", "a cache", "generated")
FEW = (
    *(f"{model}, packed" for model in MODELS),
    *(f"Qwen3Next, {how}" for how in ("bfloat16", *WRONG[1:], *LEFT)),
)
"""`make test` has these, in one run; the others are the same calls of copies of the same functions."""
RULE_COVERAGE = {
    "minimal scope": "test_all_other_calls_stay_bit_for_bit",
    "no side effects": "test_the_model_is_only_read",
    "backward compatible": "test_all_other_calls_stay_bit_for_bit",
    "no new blocking": "because a layer makes the calls of modules that it made: no lock, no collective",
    "bit for bit": "test_all_other_calls_stay_bit_for_bit",
}
#: float32 against float64, over 70 steps of the recurrence.
TOLERANCE = 1e-4


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((None, MODELS), id="5.23"),
        pytest.param(("transformers-4.57", MODELS[:1]), id="4.57", marks=pytest.mark.exhaustive),
    ],
)
def seen(request, run_ranks):
    release, models = request.param

    def run(case):
        if not case.startswith(tuple(f"{model}," for model in models)):
            pytest.skip(f"not in {release}")
        together = FEW if case in FEW else (case,)
        (report,) = run_ranks(WORKER, *together, levels=beside(release, "trainer"), ranks=1)
        assert report["version"].startswith(release.rpartition("-")[2] if release else "5.")
        assert report["status"] == "applied"
        return report

    return States(run)


def of(hows):
    cases = [f"{model}, {how}" for how in hows for model in MODELS]
    return pytest.mark.parametrize("case", exhaustive_but(cases, *(case for case in cases if case in FEW)))


@of(WRONG)
def test_without_it_states_of_other_documents_come_in(seen, case):
    assert seen["before"][case]["gradient"] > 0.1


@of(WRONG)
def test_with_it_a_document_is_as_it_is_alone(seen, case):
    found = seen["after"][case]
    assert found["parameters"] > 10
    assert found["gradient"] < TOLERANCE
    assert found["loss"] < TOLERANCE


@of(["bfloat16"])
def test_with_it_in_bfloat16_what_is_left_is_its_rounding(seen, case):
    assert seen["before"][case]["gradient"] > 2
    assert seen["after"][case]["gradient"] < 0.5  # the tensor with the smallest gradient


@of(LEFT)
def test_all_other_calls_stay_bit_for_bit(seen, case):
    assert seen["after"][case] == seen["before"][case]


@of(LEFT[:-1])
def test_the_model_is_only_read(seen, case):
    assert seen["after"][case]["touched"] == ""


@of((*WRONG, *LEFT))
def test_after_revert_it_is_as_released(seen, case):
    assert seen["reverted"][case] == seen["before"][case]


@pytest.fixture
def ranks():
    pytest.importorskip(MODELING)
    return pytest.importorskip(WORKER)


def test_the_collator_packs_so(ranks):
    """transformers' own collator gives by default what the cases take: positions that restart, and nothing else."""
    torch = pytest.importorskip("torch")
    found, wanted = ranks.collated(), ranks.rows.packed(1)
    assert set(found) == {"input_ids", "labels", "position_ids"}
    assert torch.equal(found["position_ids"], wanted["position_ids"])


def packed_logits(model, torch, ranks, **more):
    given = ranks.rows.packed(1)
    with torch.no_grad():
        return model(input_ids=given["ids"], position_ids=given["position_ids"], **more).logits


def test_it_compiles_whole_where_it_did_and_is_then_as_released(ranks, apply_patch):
    torch = pytest.importorskip("torch")

    def compiled():
        torch._dynamo.reset()
        layer = ranks.made("Qwen3_5").eval().model.layers[0]
        states = torch.ones(1, 21, 16)
        positions = ranks.rows.packed(1)["position_ids"]
        with torch.no_grad():
            return torch.compile(layer, backend="eager", fullgraph=True)(states, (states, states), None, positions)

    released = compiled()
    apply_patch(NAME)
    assert torch.equal(compiled(), released)


def test_a_forward_of_the_users_own_is_called_as_released(ranks, apply_patch):
    """Its signature may end where the release's call ends; what it computes is its own."""
    torch = pytest.importorskip("torch")
    seen = []

    class Own(importlib.import_module(MODELING).Qwen3NextGatedDeltaNet):
        def forward(self, hidden_states, cache_params=None, attention_mask=None, **keywords):
            seen.append(sorted(keywords))
            return super().forward(hidden_states.flip(1), cache_params, attention_mask, **keywords)

    def logits():
        model = ranks.made("Qwen3Next").eval()
        model.model.layers[0].linear_attn.__class__ = Own
        return packed_logits(model, torch, ranks)

    released = logits()
    apply_patch(NAME)
    assert torch.equal(logits(), released)
    assert seen[1:] == seen[:1]
    (reached,) = (row.reached for row in rlhf_patches.report() if row.name == NAME)
    assert (reached.calls, reached.asked, reached.held) == (2, 1, 0)  # the layer of full attention alone has an answer


def test_tokens_that_the_users_code_splits_stay_as_released(ranks, apply_patch):
    """Such as one rank's share of a row: its documents are other ones than those of the positions."""
    torch = pytest.importorskip("torch")
    layer, positions = ranks.made("Qwen3Next").eval().model.layers[0], ranks.rows.packed(1)["position_ids"]
    share = torch.randn(1, 10, 16, generator=torch.Generator().manual_seed(0))

    def found():
        with torch.no_grad():
            return layer(share, (share, share), position_ids=positions)

    released = found()
    apply_patch(NAME)
    assert all(map(torch.equal, found(), released))


def test_lengths_that_are_given_stay_the_kernels_task(ranks, apply_patch):
    """Without the kernels 5.23 refuses them, with the patch as without."""
    torch = pytest.importorskip("torch")
    lengths = torch.tensor([0, 7, 12, 21], dtype=torch.int32)
    apply_patch(NAME)
    for given in ({"seq_idx": torch.zeros(1, 21, dtype=torch.int32)}, {"cu_seq_lens_q": lengths}):
        with pytest.raises(ValueError, match="can't keep packed sequences apart without"):
            packed_logits(ranks.made("Qwen3Next").eval(), torch, ranks, **given)


def test_a_convolution_is_one_call_of_its_module(ranks, apply_patch):
    """ZeRO-3 gathers the weights of a module in each call, so ranks must not call it in other numbers."""
    torch = pytest.importorskip("torch")

    def calls():
        seen, model = [], ranks.made("Qwen3Next").eval()
        for name, module in model.model.layers[0].named_modules():
            module.register_forward_hook(lambda *_, name=name: seen.append(name))
        packed_logits(model, torch, ranks)
        return seen

    released = calls()
    apply_patch(NAME)
    assert calls() == released


def test_each_row_has_its_own_documents(ranks, apply_patch):
    torch = pytest.importorskip("torch")
    apply_patch(NAME)
    model = ranks.made("Qwen3Next").eval()
    ids = torch.cat(ranks.rows.documents())[None].expand(3, -1)
    positions = [[(*range(7), *range(5), *range(9)), (*range(4), *range(16), 0), range(21)][row] for row in range(3)]
    positions = torch.tensor([list(row) for row in positions])
    with torch.no_grad():
        together = model(input_ids=ids, position_ids=positions).logits
        for row in range(3):
            starts = [*(positions[row] == 0).nonzero().flatten().tolist(), 21]
            parts = [model(input_ids=ids[:1, start:end]).logits for start, end in itertools.pairwise(starts)]
            torch.testing.assert_close(together[row], torch.cat(parts, dim=1)[0], atol=1e-5, rtol=1e-5)


def test_a_layer_that_is_computed_again_by_itself_stays_as_released(ranks, apply_patch):
    """Activation checkpointing of a mixer alone: the second time nobody knows the documents."""
    torch = pytest.importorskip("torch")
    wrappers = pytest.importorskip("torch.distributed.algorithms._checkpoint.checkpoint_wrapper")

    def gradient():
        model = ranks.made("Qwen3_5").train()
        layer = model.model.layers[0]
        layer.linear_attn = wrappers.checkpoint_wrapper(layer.linear_attn)
        given = ranks.rows.packed(1)
        model(input_ids=given["ids"], position_ids=given["position_ids"]).logits.square().sum().backward()
        return [p.grad for p in model.parameters()]

    released = gradient()
    apply_patch(NAME)
    assert all(map(torch.equal, gradient(), released))


@pytest.mark.parametrize("name", ["causal_conv1d_fn", "torch_chunk_gated_delta_rule", "conv1d"])
def test_a_users_own_function_is_called_as_released(ranks, apply_patch, monkeypatch, name):
    """So are the others of its layer: one of two would be neither right nor as released."""
    torch = pytest.importorskip("torch")
    modeling = importlib.import_module("transformers.models.qwen3_5.modeling_qwen3_5")

    class Own(torch.nn.Conv1d):
        def forward(self, states):
            return super().forward(states)

    def logits():
        model = ranks.made("Qwen3_5").eval()
        if name == "conv1d":
            model.model.layers[0].linear_attn.conv1d.__class__ = Own
        else:
            original = getattr(modeling, name)
            monkeypatch.setattr(modeling, name, lambda *given, **keywords: original(*given, **keywords))
        return packed_logits(model, torch, ranks)

    released = logits()
    apply_patch(NAME)
    assert torch.equal(logits(), released)


@pytest.mark.parametrize("write", ["data", "numpy"])
def test_writes_that_torch_does_not_count_are_seen_in_the_next_forward(ranks, apply_patch, write):
    """A buffer that takes each batch's positions."""
    torch = pytest.importorskip("torch")
    model, given = ranks.made("Qwen3Next").eval(), ranks.rows.packed(1)
    apply_patch(NAME)
    buffer, whole = given["position_ids"].clone(), torch.arange(21)[None]
    with torch.no_grad():
        first = model(input_ids=given["ids"], position_ids=buffer).logits
        version = buffer._version
        buffer.data.copy_(whole) if write == "data" else buffer.numpy().__setitem__(slice(None), whole.numpy())
        assert buffer._version == version
        assert torch.equal(
            model(input_ids=given["ids"], position_ids=buffer).logits, model(input_ids=given["ids"]).logits
        )
    assert torch.equal(first, packed_logits(model, torch, ranks))


def test_where_no_values_are_it_is_as_released(ranks, apply_patch):
    torch = pytest.importorskip("torch")
    states = importlib.import_module("rlhf_patches.patches.transformers._document_states")
    seen = []

    def read(positions):
        seen.append(states._of(positions[None], 0))
        return positions

    torch.vmap(read)(ranks.rows.packed(2)["position_ids"])
    assert seen == [None]


def test_padding_at_a_rows_end_is_one_document(ranks):
    """Its tokens have position 0, and each would be a call of its own."""
    torch = pytest.importorskip("torch")
    states = importlib.import_module("rlhf_patches.patches.transformers._document_states")
    rows = torch.tensor([[0, 1, 2, 0, 0, 0], [0, 0, 1, 0, 1, 0], [0, 0, 0, 0, 0, 0]])
    assert states._of(rows, None) == [[0, 3, 6], [0, 1, 3, 5, 6], [0, 6]]
    assert states._of(rows[::2], None) == []


def test_padding_at_a_rows_end_changes_no_document(ranks, apply_patch):
    torch = pytest.importorskip("torch")
    apply_patch(NAME)
    model, given = ranks.made("Qwen3Next").eval(), ranks.rows.packed(2)
    ids = torch.cat([given["ids"], torch.zeros(2, 5, dtype=torch.long)], dim=1)
    positions = torch.cat([given["position_ids"], torch.zeros(2, 5, dtype=torch.long)], dim=1)
    positions[1, 7:] = torch.arange(19)
    with torch.no_grad():
        found = model(input_ids=ids, position_ids=positions).logits[0, :21]
    torch.testing.assert_close(found, packed_logits(model, torch, ranks)[0], atol=1e-5, rtol=1e-5)


def test_what_is_not_known_is_not_decided(ranks, apply_patch):
    """A row that begins within a document: its positions restart, and it is left as released."""
    torch = pytest.importorskip("torch")
    apply_patch(NAME)
    model = ranks.made("Qwen3Next").eval()
    with torch.no_grad():
        model(input_ids=torch.ones(1, 6, dtype=torch.long), position_ids=torch.tensor([[3, 4, 5, 0, 1, 2]]))
    (reached,) = (row.reached for row in rlhf_patches.report() if row.name == NAME)
    assert (reached.calls, reached.asked, reached.held) == (2, 1, 0)


def test_positions_that_change_in_place_are_read_again(ranks, apply_patch):
    torch = pytest.importorskip("torch")
    apply_patch(NAME)
    states = importlib.import_module("rlhf_patches.patches.transformers._document_states")
    positions = torch.tensor([[0, 1, 2, 0, 1]])
    assert states._of(positions, 0) == [[0, 3, 5]]
    positions[0] = torch.arange(5)
    assert states._of(positions, 1) == []
    with torch.inference_mode():
        assert states._of(torch.tensor([[0, 0, 1, 2, 3]]), 2) == [[0, 1, 5]]


@pytest.mark.parametrize(
    "positions",
    [
        [[[0, 1, 0, 1]], [[0, 1, 0, 1]], [[0, 1, 1, 2]]],  # an image's height or width
        [[0, 1, 0, 1], [0, 1, 2, 4]],
        [[3, 4, 0, 1]],
        [[[[0, 0]]]],
    ],
)
def test_other_positions_are_no_documents(ranks, positions):
    torch = pytest.importorskip("torch")
    states = importlib.import_module("rlhf_patches.patches.transformers._document_states")
    assert states._of(torch.tensor(positions), 0) is None
    assert states._of(positions, 0) is None


def test_a_token_that_is_generated_is_no_packed_row(ranks):
    torch = pytest.importorskip("torch")
    states = importlib.import_module("rlhf_patches.patches.transformers._document_states")
    assert states._of(torch.tensor([[5], [0]]), 0) == []
    assert states._of(None, 0) == []
