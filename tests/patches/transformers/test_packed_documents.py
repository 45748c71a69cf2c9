"""transformers-packed-documents: packed rows of tiny gpt-oss and AFMoE, against their documents alone in float64."""

from __future__ import annotations

import importlib
import sys
from unittest import mock

import pytest

from tests.harness.by_case import States, exhaustive_but
from tests.harness.forkserver import beside

WORKER = "rlhf_patches.patches.transformers.proofs.packed_documents_ranks"
WRONG = ("packed", "2 rows", "compiled")
LEFT = ("a mask", "not packed", "no positions", "other jumps", "a cache", "generated")
RULE_COVERAGE = {
    "minimal scope": "test_all_other_calls_stay_bit_for_bit",
    "no side effects": "test_the_model_is_only_read",
    "backward compatible": "test_all_other_calls_stay_bit_for_bit",
    "no new blocking": "because it computes on the positions: no lock, no collective, nothing read from a device",
    "bit for bit": "test_all_other_calls_stay_bit_for_bit",
}
#: float32 against float64.
TOLERANCE = 1e-5


MODELS = ("GptOss, eager", "Afmoe, eager", "Afmoe, sdpa")
FEW = (
    *(f"{model}, packed" for model in MODELS),
    *("Qwen3, packed", "GptOss, eager, 2 rows", "Afmoe, sdpa, a mask", "Afmoe, sdpa, no positions"),
    *(f"GptOss, eager, {how}" for how in LEFT),
)
"""`make test` has these, in one run; the others are the same calls of the same functions."""


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
        if not case.startswith((*models, "Qwen3")):
            pytest.skip(f"not in {release}")
        # The patch waits for an import of gpt-oss, which a case of Qwen3's does not have.
        few = tuple(each for each in FEW if each.startswith((*models, "Qwen3")))
        together = few if case in FEW else (case,)
        (report,) = run_ranks(WORKER, *together, levels=beside(release, "trainer"), ranks=1)
        assert report["version"].startswith(release.rpartition("-")[2] if release else "5.")
        assert report["status"] == "applied"
        return report

    return States(run)


def of(hows):
    cases = [f"{model}, {how}" for how in hows for model in MODELS]
    return pytest.mark.parametrize("case", exhaustive_but(cases, *(case for case in cases if case in FEW)))


@of(WRONG)
def test_without_it_documents_attend_to_each_other(seen, case):
    assert seen["before"][case]["gradient"] > 0.1


@of(WRONG)
def test_with_it_a_document_is_as_it_is_alone(seen, case):
    found = seen["after"][case]
    assert found["parameters"] > 10
    assert found["gradient"] < TOLERANCE
    assert found["loss"] < TOLERANCE


@of(LEFT)
def test_all_other_calls_stay_bit_for_bit(seen, case):
    assert seen["after"][case] == seen["before"][case]


@of(LEFT[:-1])
def test_the_model_is_only_read(seen, case):
    assert seen["after"][case]["touched"] == ""


def test_a_model_that_was_right_stays(seen):
    assert seen["after"]["Qwen3, packed"] == seen["before"]["Qwen3, packed"]
    assert seen["after"]["Qwen3, packed"]["gradient"] < TOLERANCE


@of((*WRONG, *LEFT))
def test_after_revert_it_is_as_released(seen, case):
    assert seen["reverted"][case] == seen["before"][case]


@pytest.mark.exhaustive
def test_it_compiles_whole_and_exports_where_it_did(apply_patch):
    """gpt-oss with experts that torch.compile can trace: one graph, that can be exported, with the patch as without."""
    torch = pytest.importorskip("torch")
    ranks = pytest.importorskip(WORKER)

    def traced():
        with mock.patch.dict(ranks.SIZES, experts_implementation="batched_mm"):
            model = ranks.made("GptOss").eval()
        ids = torch.cat(ranks.documents())[None]
        given = {"input_ids": ids, "position_ids": torch.cat([torch.arange(n) for n in ranks.DOCUMENTS])[None]}
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        exported = torch.export.export(model, (), given).module()
        with torch.no_grad():
            return [each(**given).logits for each in (model, compiled, exported)]

    released = traced()
    apply_patch("transformers-packed-documents")
    plain, *found = traced()
    assert not torch.equal(plain, released[0])
    for each in found:
        torch.testing.assert_close(each, plain)


def test_what_a_model_counts_itself_is_no_packing_while_it_is_compiled(apply_patch):
    """Without positions the kernel is told that it is causal, and gets no mask of all tokens by all, as released."""
    torch = pytest.importorskip("torch")
    ranks = pytest.importorskip(WORKER)
    if not hasattr(ranks.transformers, "AfmoeConfig"):
        pytest.skip("transformers has no AFMoE")

    def attention():
        seen = []

        def backend(graph, _):
            calls = (node.kwargs for node in graph.graph.nodes if "scaled_dot_product" in str(node.target))
            seen.extend((str(each.get("attn_mask")), each.get("is_causal")) for each in calls)
            return graph.forward

        sizes = {"experts_implementation": "batched_mm", "layer_types": ["full_attention"], "num_hidden_layers": 1}
        with mock.patch.dict(ranks.SIZES, sizes):
            model = ranks.made("Afmoe", "sdpa").eval()
        torch._dynamo.reset()
        torch.compile(model, backend=backend, fullgraph=True)(input_ids=torch.cat(ranks.documents())[None])
        return seen

    released = attention()
    apply_patch("transformers-packed-documents")
    assert attention() == released == [("None", True)]


def test_an_own_mask_function_gets_the_released_keywords(apply_patch, monkeypatch):
    """Its signature may end where the released call ends. The other mask is as released, too: half would be neither."""
    torch = pytest.importorskip("torch")
    ranks = pytest.importorskip(WORKER)
    modeling = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")
    original, seen = modeling.create_causal_mask, []
    ids = torch.cat(ranks.documents())[None]

    def own(**keywords):
        seen.append(sorted(keywords))
        return original(**keywords)

    def masks(function):
        monkeypatch.setattr(modeling, "create_causal_mask", function)
        with torch.no_grad():
            return ranks.made("GptOss").eval()(ids, position_ids=ranks.beside(None)["position_ids"][:1]).logits

    released = masks(own)
    apply_patch("transformers-packed-documents")
    assert torch.equal(masks(own), released)
    assert "position_ids" not in seen[0]
    assert seen[1:] == seen[:1]
    assert not torch.equal(masks(original), released)


def test_the_models_own_function_is_known_where_masking_utils_has_another(monkeypatch):
    """Somebody has replaced it after the model's import, and before the patch."""
    positions = pytest.importorskip("rlhf_patches.patches.transformers._document_positions")
    modeling = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")
    monkeypatch.setattr("transformers.masking_utils.create_causal_mask", lambda **_: None)
    try:
        own = importlib.reload(positions)._OWN
        assert any(modeling.create_causal_mask is function for function in own)
        assert not any(function is sys.modules["transformers.masking_utils"].create_causal_mask for function in own)
    finally:
        monkeypatch.undo()
        importlib.reload(positions)
