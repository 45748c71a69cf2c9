"""``rlhf-patches diagnose``: "certain" only where the framework's own function fails, and never a wrong bug."""

from __future__ import annotations

import io

import pytest

from rlhf_patches import Guard, Patch, Rewrite, Signature, Variant
from rlhf_patches.definitions import registry
from rlhf_patches.offline import diagnose, frames, hints, log_versions, tracebacks
from rlhf_patches.offline.frames import Frame

SITE = "/v/lib/python3.11/site-packages"


def found(log: str) -> list[tuple[str, str]]:
    """The bugs, and how certain they are."""
    bugs, _ = diagnose.diagnose(tracebacks.read(io.BytesIO(log.encode())), registry.load()[0])
    return [(one.item.patch.name, one.match) for one in bugs]


def trace(error: str, *places: str, begin: str = "Traceback (most recent call last):\n") -> str:
    """A traceback; a place is ``path:function``."""
    lines = [f'  File "{file}", line 7, in {function}\n    x\n' for file, _, function in map(split, places)]
    return f"{begin}{''.join(lines)}{error}\n"


def split(place: str) -> tuple[str, str, str]:
    return place.rpartition(":")


TRAINER = f"{SITE}/transformers/trainer.py"
LOADER = f"{SITE}/trl/import_utils.py:_get_module"
ITEMS = "compute_loss() got an unexpected keyword argument 'num_items_in_batch'"
NO_VLLM = "ModuleNotFoundError: No module named 'vllm'"
GUIDED = "ImportError: cannot import name 'GuidedDecodingParams' from 'vllm.sampling_params' (/x.py)"


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        (
            trace(f"TypeError: RewardTrainer.{ITEMS}", f"{TRAINER}:training_step"),
            [("trl-trainer-overrides", "certain")],
        ),
        (trace(f"TypeError: MyRewardTrainer.{ITEMS}", f"{TRAINER}:training_step"), []),
        (trace(f"TypeError: MyTrainer.{ITEMS}", f"{TRAINER}:training_step"), []),
        (f"TypeError: MyTrainer.{ITEMS}\n", []),
        (
            trace("TypeError: Mine.log() takes 2 positional arguments but 3 were given",
                  f"{TRAINER}:_maybe_log_save_evaluate"),
            [],
        ),
        (
            trace("TypeError: NewGRPOTrainer._get_train_sampler() takes 1 positional argument but 2 were given",
                  f"{TRAINER}:_get_dataloader"),
            [],
        ),
        (
            trace("TypeError: DPOTrainer.__init__() got an unexpected keyword argument 'tokenizer'",
                  f"{SITE}/trl/trainer/sft_trainer.py:__init__"),
            [],
        ),
    ],
)  # fmt: skip
def test_the_class_that_the_error_names_is_the_frameworks(log, expected):
    assert found(log) == expected


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        (trace(NO_VLLM, LOADER, f"{SITE}/trl/extras/vllm_client.py:<module>"), [("trl-optional-packages", "certain")]),
        (trace(NO_VLLM, LOADER, f"{SITE}/unsloth_zoo/vllm_utils.py:<module>"), []),
        (trace(NO_VLLM, LOADER, "/w/trl_plugins/serve.py:<module>"), []),
        (trace(NO_VLLM, "/app/serve.py:<module>", begin=""), []),
        # An earlier traceback, which has ended, is no evidence; one that goes on is.
        (trace("ValueError: 3", LOADER) + "step 1\n" + trace(NO_VLLM, "/app/serve.py:<module>"), []),
        (trace("ValueError: 3", LOADER) + "step 1\n" * 50 + f"{NO_VLLM}\n", [("trl-optional-packages", "possible")]),
        (
            trace("RuntimeError: Could not infer dtype of NoneType", "/w/data.py:collate", begin=""),
            [],
        ),
        (
            trace("RuntimeError: Could not infer dtype of NoneType",
                  f"{SITE}/trl/trainer/grpo_trainer.py:_generate_and_score_completions", "/w/rewards.py:score"),
            [],
        ),
        (
            trace("RuntimeError: you can only change requires_grad flags of leaf variables.",
                  f"{SITE}/peft/tuners/tuners_utils.py:enable_adapters", f"{SITE}/torch/nn/modules/module.py:f"),
            [("peft-disable-adapter-fsdp", "certain")],
        ),
        (
            trace("RuntimeError: cannot reshape tensor of 0 elements into shape [0, -1]",
                  f"{SITE}/swift/megatron/trainers/kto_trainer.py:forward_step", f"{SITE}/megatron/core/a.py:forward"),
            [("swift-kto-sequence-parallel", "certain")],
        ),
    ],
)  # fmt: skip
def test_the_function_that_fails_is_the_frameworks(log, expected):
    assert found(log) == expected


def test_a_model_around_the_model_is_no_other_package():
    trainer = f"{SITE}/trl/trainer/dpo_trainer.py:__init__"
    inner = f"{SITE}/peft/peft_model.py:__getattr__", f"{SITE}/torch/nn/modules/module.py:__getattr__"
    log = trace("AttributeError: 'A' object has no attribute 'warnings_issued'", trainer, *inner)
    assert found(log) == [("trl-warnings-issued", "certain")]


def test_a_function_of_a_torch_mode_is_no_other_package():
    targets = (
        f"{SITE}/verl/trainer/distillation/losses.py:compute_distillation_loss_range",
        "/app/x.py:__torch_function__",
    )
    log = trace("RuntimeError: min(): Expected reduction dim to be specified for input.numel() == 0.", *targets)
    assert found(log) == [("verl-padding-only-micro-batch", "certain")]


NO_SYNC = (
    "AssertionError: When overlap_grad_reduce is True, config.no_sync_func must be None; a custom no_sync_func is not "
    "supported when overlapping grad-reduce"
)


def test_a_message_of_several_bugs_makes_none_of_them_likely():
    assert {match for _, match in found(f"{NO_SYNC}\n")} == {"possible"}
    assert found(trace(NO_SYNC, "/app/my/trainer.py:step", begin="")) == found(trace(NO_SYNC, "/app/a.py:step")) == []
    assert found("ValueError: label_smoothing must be > 0 for loss_type='exo_pair'\n") == [
        ("trl-dpo-liger-settings", "likely")
    ]


@pytest.mark.parametrize(
    "error", [NO_VLLM, GUIDED, "ImportError: cannot import name 'HybridCache' from 'transformers'"]
)
def test_a_bare_import_error_is_possible_at_most(error):
    assert [match for _, match in found(f"{error}\n")] == ["possible"]


SAMPLER = trace(
    "TypeError: GRPOTrainer._get_train_sampler() takes 1 positional argument but 2 were given",
    f"{TRAINER}:_get_dataloader",
)


@pytest.mark.parametrize(
    ("banner", "match"),
    [
        ("", "certain"),
        ("trl==0.16.1\n", "certain"),
        ("- TRL version: 0.24.0\n", "possible"),
        ("Successfully installed torch-2.6.0 trl-0.24.0\n", "possible"),
        ("- `transformers` version: 4.46.3\n- TRL version: 0.16.0\n", "possible"),
        # One of several is in the range; what will be removed is no version of the run.
        ("trl==0.24.0\ntrl==0.16.0\n", "certain"),
        ("FutureWarning: this will be removed in trl 0.24.0\n", "certain"),
        ("requirement trl>=0.24.0 not met\n", "certain"),
    ],
)
def test_a_version_that_is_not_affected_takes_certain_away(banner, match):
    assert found(banner + SAMPLER) == found(SAMPLER + banner) == [("trl-grpo-train-sampler", match)]


def test_the_versions_that_a_line_names():
    lines = b'transformers   4.57.1\n"vllm": "0.12.0",\nms_swift 3.9.0rc1 and torch 2.6.0+cu124, at 10.0.0.1\n'
    named = [(one.distribution, one.version) for line in lines.splitlines() for one in log_versions.named(line)]
    assert named[:3] == [("transformers", "4.57.1"), ("vllm", "0.12.0"), ("ms-swift", "3.9.0rc1")]
    assert ("at", "10.0.0") not in named
    assert list(log_versions.named(b"x" * 900 + b" trl 0.1.0" * 99)) == []


def test_out_of_memory_where_a_memory_patch_repairs():
    error = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 9.28 GiB."
    at = "/opt/verl/verl/utils/megatron/tensor_parallel.py"
    inside = trace(error, "/opt/verl/verl/workers/actor/megatron_actor.py:forward_backward_batch", f"{at}:forward")
    assert found(inside) == [("verl-logprob-entropy", "possible")]
    assert found(trace(error, f"{at}:forward", "/opt/Megatron-LM/megatron/core/attention.py:forward")) == []
    assert found(f"{error}\n") == []
    # Of two bugs with a function of one name in one module, the one whose other functions the traceback passes.
    skyrl = "/SkyRL/skyrl/backends/skyrl_train/distributed/megatron/model_utils.py"
    for caller, bug in (("vocab_parallel_entropy", "entropy"), ("from_parallel_logits_to_logprobs", "logprob")):
        log = trace(error, f"{skyrl}:{caller}", f"{skyrl}:forward", f"{skyrl}:_log_softmax")
        assert found(log) == [(f"skyrl-{bug}-backward", "possible")]


@pytest.mark.parametrize(
    ("file", "is_ours"),
    [
        (f"{SITE}/trl/x.py", True),
        ("/home/me/src/trl/trl/x.py", True),
        ("trl/x.py", True),
        (f"{SITE}/trlx/x.py", False),
        (f"{SITE}/other/trl/x.py", False),
        ("C:\\v\\Lib\\site-packages\\trl\\x.py", True),
    ],
)
def test_whose_a_frame_is(file, is_ours):
    assert frames.is_of("trl.trainer:f", Frame(file, "f")) is is_ours


def test_a_name_with_its_class():
    target = "trl.trainer.grpo_trainer:GRPOTrainer.log"
    for function, same in (("log", True), ("GRPOTrainer.log", True), ("Other.log", False), ("f.<locals>.log", False)):
        assert frames.is_at(target, Frame("trl/trainer/grpo_trainer.py", function)) is same
    assert frames.is_at("a.b:f.g", Frame("a/b.py", "f.<locals>.g"))


@pytest.mark.parametrize(
    ("file", "function"),
    [
        ("/usr/lib/python3.11/signal.py", "signal"),
        ("<frozen importlib._bootstrap>", "_gcd_import"),
        ("C:\\Python311\\Lib\\importlib\\__init__.py", "import_module"),
        (f"{SITE}/torch/nn/modules/module.py", "_call_impl"),
        ("torch/utils/checkpoint.py", "checkpoint"),
    ],
)
def test_torch_and_the_standard_library_raise_what_their_caller_does(file, function):
    mine = Frame("/home/me/lib/train.py", "main")
    assert frames.failing([mine, Frame(file, function)]) == mine


def test_what_is_said_of_a_users_own_class(said, tmp_path):
    log = tmp_path / "train.log"
    log.write_text(trace(f"TypeError: MyTrainer.{ITEMS}", f"{TRAINER}:training_step"))
    status, out, _ = said("diagnose", log)
    assert (status, out.startswith("No known bug in 1 exception.")) == (0, True)
    assert "If the class is yours, add `num_items_in_batch=None`." in " ".join(out.split())
    log.write_text(trace(f"TypeError: DPOTrainer.{ITEMS}", f"{TRAINER}:training_step"))
    assert "If the class is yours" not in said("diagnose", log)[1]
    assert hints.hint("Mine.log() takes 2 positional arguments but 3 were given").startswith("Mine.log() takes fewer")
    assert hints.hint("f() missing 1 required positional argument: 'x'") == ""


def test_what_is_said_of_a_doubt(said, tmp_path):
    log = tmp_path / "train.log"
    for text, words in (
        ("trl==0.24.0\n" + SAMPLER, "possible (the log names trl 0.24.0, which does not have this bug)"),
        (f"{NO_VLLM}\n", "possible (no traceback, and other code raises this message, too)"),
    ):
        log.write_text(text)
        assert words in said("diagnose", log)[1]


def test_a_part_of_a_message_begins_with_a_word():
    patch = Patch(
        name="fw-log", summary="s", symptom="s", cause="c", repair="r", obsolete_when="never",
        references=("https://github.com/a/b/issues/1",),
        signatures=(Signature("TypeError", "Own.log() takes", ("fw.a:f",)), Signature("KeyError", "'x'", ("fw.a:f",))),
        variants=(Variant(Guard("fw", ""), (Rewrite("fw.a:f", "a()", "b()"),)),),
    )  # fmt: skip
    item = registry.Registered(patch, "fw")

    def matches(error: str) -> bool:
        log = io.BytesIO(trace(error, "/fw/a.py:f").encode())
        return bool(diagnose.diagnose(tracebacks.read(log), [item])[0])

    assert matches("TypeError: Own.log() takes 2")
    assert matches("TypeError: fw.Own.log() takes 2")
    assert not matches("TypeError: MyOwn.log() takes 2")
    assert matches("KeyError: my'x'")
