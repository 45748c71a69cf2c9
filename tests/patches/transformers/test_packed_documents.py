"""transformers-packed-documents: packed rows of tiny gpt-oss and AFMoE, against their documents alone in float64."""

from __future__ import annotations

from unittest import mock

import pytest

from tests.harness.warm import beside

WORKER = "rlhf_patches.patches.transformers.proofs.packed_documents_ranks"
WRONG = ("packed", "2 rows", "compiled")
LEFT = ("a mask", "not packed", "no positions", "other jumps", "a cache", "generated")
HELD = {
    "least reach": "test_all_other_calls_stay_bit_for_bit",
    "hands off": "test_the_model_is_only_read",
    "whatever worked": "test_all_other_calls_stay_bit_for_bit",
    "no new wait": "because it computes on the positions: no lock, no collective, nothing read from a device",
    "bit for bit": "test_all_other_calls_stay_bit_for_bit",
}
#: float32 against float64.
TOLERANCE = 1e-5


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((None, ("GptOss, eager", "Afmoe, eager", "Afmoe, sdpa")), id="5.23"),
        pytest.param(("transformers-4.57", ("GptOss, eager",)), id="4.57", marks=pytest.mark.exhaustive),
    ],
)
def seen(request, run_ranks):
    release, models = request.param
    (report,) = run_ranks(WORKER, levels=beside(release, "trainer"), ranks=1)
    assert report["version"].startswith(release.rpartition("-")[2] if release else "5.")
    assert report["status"] == "applied"
    return report, models


@pytest.mark.parametrize("how", WRONG)
def test_without_it_documents_attend_to_each_other(seen, how):
    report, models = seen
    for model in models:
        assert report["before"][f"{model}, {how}"]["gradient"] > 0.1


@pytest.mark.parametrize("how", WRONG)
def test_with_it_a_document_is_as_it_is_alone(seen, how):
    report, models = seen
    for model in models:
        found = report["after"][f"{model}, {how}"]
        assert found["parameters"] > 10
        assert found["gradient"] < TOLERANCE
        assert found["loss"] < TOLERANCE


@pytest.mark.parametrize("how", LEFT)
def test_all_other_calls_stay_bit_for_bit(seen, how):
    report, models = seen
    for model in models:
        assert report["after"][f"{model}, {how}"] == report["before"][f"{model}, {how}"]


def test_the_model_is_only_read(seen):
    report, models = seen
    for model in models:
        for how in LEFT[:-1]:
            assert report["after"][f"{model}, {how}"]["touched"] == ""


def test_a_model_that_was_right_stays(seen):
    report, _ = seen
    assert report["after"]["Qwen3, packed"] == report["before"]["Qwen3, packed"]
    assert report["after"]["Qwen3, packed"]["gradient"] < TOLERANCE


def test_after_revert_it_is_as_released(seen):
    report, _ = seen
    assert report["reverted"] == report["before"]


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
