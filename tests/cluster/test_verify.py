"""`rlhf_patches.verify` and RLHF_PATCHES_VERIFY on real torch.distributed: who learns what, and what it costs."""

from __future__ import annotations

import datetime
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rlhf_patches.runs import comparison, process_group
from rlhf_patches.runs.processes import Process
from tests.harness import ranks, toy_slime

WORKER = Path(ranks.__file__).with_name("verify_ranks.py")
ONE_SWITCHED_OFF = {1: {"RLHF_PATCHES_DISABLE": toy_slime.PATCH}}
ON = {"RLHF_PATCHES_VERIFY": "1"}


@pytest.fixture(scope="module")
def dist() -> Any:
    """torch.distributed: what collects these tests and runs others does not load it."""
    import torch.distributed

    return torch.distributed


def reports(ended: list[ranks.Ended]) -> list[Any]:
    """What each rank reports."""
    for rank in ended:
        assert rank.status == 0, rank.errors
    return [rank.said for rank in ended]


@pytest.fixture(scope="module")
def said(slime, forkserver, tmp_path_factory):
    """Run a scenario in processes that have imported torch; returns what each rank reports."""

    def run(*arguments: str, number: int = 2, settings: dict[str, str] | None = None, **options: Any) -> list[Any]:
        options["settings"] = {"PYTHONPATH": str(slime), **(settings or {})}
        return reports(
            ranks.run_forked(forkserver, tmp_path_factory.mktemp("ranks"), WORKER, arguments, number, **options)
        )

    return run


@pytest.fixture(scope="module")
def said_by_torchrun(slime):
    """The same in fresh interpreters, where torch is imported after this package, or by the script."""

    def run(*arguments: str, settings: dict[str, str], **options: Any) -> list[Any]:
        return reports(ranks.run(WORKER, arguments, settings={"PYTHONPATH": str(slime), **settings}, **options))

    return run


@pytest.fixture(scope="module")
def calls(said):
    return said("calls", number=3)


def everywhere(calls, what):
    """What all ranks were told: the same."""
    (text,) = {report[what] for report in calls}
    return text


TOO_EARLY = "call torch.distributed.init_process_group() before verify()"


@pytest.mark.parametrize("what", ["before the group", "destroyed"])
def test_without_a_group(calls, what):
    assert TOO_EARLY in everywhere(calls, what)


def test_before_torch_is_imported():
    for report in reports(ranks.run(WORKER, ("before_torch",))):
        assert TOO_EARLY in report["verify"]
        assert not report["torch"], "verify() imports nothing"


@pytest.mark.parametrize("what", ["never applied", "pending everywhere", "applied again", "initialized again"])
def test_nothing_is_said_where_all_is_equal(calls, what):
    assert everywhere(calls, what) is None


def test_it_does_not_matter_who_has_imported_the_framework(calls):
    assert [report["statuses"] for report in calls] == ["applied", "pending", "pending"]
    assert everywhere(calls, "imported on one") is None


def test_apply_was_forgotten_on_one(calls):
    text = everywhere(calls, "applied on two of three")
    assert text.startswith("VerifyError: the 3 ranks of this process group have different patches.\n")
    assert "\nslime-no-sync-" in text
    assert "\n  ranks 0, 2 on " in text
    assert "): inactive (apply() has not been called)" in text
    assert "megatron" not in text, "what is not installed makes no difference"


@pytest.mark.parametrize(
    ("what", "others", "one"),
    [("reverted on one", "0-1", 2), ("initialized again, differing", "0, 2", 1)],
)
def test_a_difference_is_told_to_every_rank(calls, what, others, one):
    lines = everywhere(calls, what).splitlines()
    assert lines[1] == f"{toy_slime.PATCH}:"
    assert lines[2].startswith(f"  ranks {others} on ")
    assert lines[2].endswith(": applied or pending (slime (version unknown))")
    assert lines[3].startswith(f"  rank {one} on ")
    assert lines[3].endswith("): disabled (reverted by revert())")


def test_sub_groups_concern_their_members_only(calls):
    first, second, third = (report["groups"] for report in calls)
    assert first == {"0 and 1": None, "1 and 2": None}
    assert second["0 and 1"] is third["0 and 1"] is None
    assert second["1 and 2"] == third["1 and 2"]
    assert "the 2 ranks of this process group" in second["1 and 2"]
    assert "rank 2 on " in second["1 and 2"]
    assert everywhere([{"alone": str(report["alone"])} for report in calls], "alone") == "[None, None, None]"


def test_wrong_arguments_say_what_was_expected(calls):
    for report in calls:
        *timeouts, group = report["wrong"]
        for text in timeouts:
            assert text.startswith("SettingsError: timeout is ")
            assert text.endswith("expected seconds, more than 0, or a datetime.timedelta")
        assert group == "SettingsError: group is 3: expected a torch.distributed.ProcessGroup, or None"
    assert everywhere(calls, "after wrong arguments") is None, "and the ranks are still in step"


def test_no_collective(calls):
    for report in calls:
        assert report["collectives"]["verify"] == []
        assert "c10d::barrier" in report["collectives"]["barrier"], "the count would see one"


def test_a_few_store_operations_a_rank(calls):
    """add, set, add; the last to come looks, reads all, writes; the others wait; get, add; one closes the door."""
    operations = [report["store"] for report in calls]
    assert all(found[:3] == ["add", "set", "add"] for found in operations)
    total = Counter(name for found in operations for name in found)
    del total["has_extended_api"]  # asks nobody
    assert total["multi_get"] == total["compare_set"] == 1
    assert total["wait"] in (2, 3)  # the first rank, if it was the last to come, may have nothing to wait for
    assert sum(total.values()) <= 6 * len(calls) + 5


def test_a_rank_that_comes_too_late_is_named_and_told_the_same(calls):
    text = everywhere(calls, "late")
    assert text.startswith("VerifyError: rank 1 of 3 has not called rlhf_patches.verify() within 6 s: ")
    assert "Present: ranks 0, 2 on " in text
    assert everywhere(calls, "after a late rank") is None, "the next call is a new one"


def test_the_stores_host_stays_until_all_have_read_the_verdict(said):
    found = said("leaves_at_once", number=3)
    assert "rank 0 on " in everywhere(found, "verify")


def test_the_fake_backend_has_no_other_ranks(said):
    (report,) = said("backend", "fake", number=1)
    assert report["verify"] is None


def test_a_store_in_a_file(said, tmp_path):
    found = said("backend", "file", settings={"STORE": str(tmp_path / "store")})
    assert "rank 1 on " in everywhere(found, "verify")
    assert "rank 1 of 2 has not called rlhf_patches.verify() within 2 s" in found[0]["late"]


def test_calls_on_one_store_do_not_read_each_other(dist):
    """Two groups one after the other on the same store, as where a launcher hosts it; threads for ranks."""
    store = dist.PrefixStore("as init_process_group does", dist.HashStore())

    def exchange(*packages: str | None, limit: float = 60) -> list[str | None]:
        found: dict[int, str | None] = {}

        def take_part(rank: int, package: str) -> None:
            group = process_group._Group(store, "world", list(range(len(packages))), rank)
            found[rank] = process_group._Exchange(group, limit).run(
                Process("a", 1, str(rank), {"rlhf-patches": package}, {})
            )

        threads = [threading.Thread(target=take_part, args=item) for item in enumerate(packages) if item[1]]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return list(found.values())

    assert exchange("1", "1", "1") == [None, None, None]
    told = exchange("1", "2", "1")
    assert len(set(told)) == 1
    assert "rank 1 on a" in told[0]
    assert exchange("2", "2", "2") == [None, None, None]
    assert all("rank 2 of 3 has not called" in text for text in exchange("1", "1", None, limit=0.5))


def test_of_two_verdicts_the_first_counts(dist, monkeypatch):
    """Two ranks have waited long enough at the same time, and have not found the same."""
    one = process_group._Exchange(process_group._Group(dist.HashStore(), "world", [0, 1], 0), 60)
    one._call = 1
    for rank in (0, 1):
        one._set(f"state/{rank}", comparison.to_dict(Process("a", 1, str(rank), {"rlhf-patches": "1"}, {})))
    compare = process_group.differences

    def while_another_is_faster(processes):
        one._set("verdict", {"present": 1, "error": "the first"})
        return compare(processes)

    monkeypatch.setattr(process_group, "differences", while_another_is_faster)
    one._decide()
    assert one._get("verdict") == {"present": 1, "error": "the first"}


STORES = {
    "hash": lambda dist, folder: dist.HashStore(),
    "file": lambda dist, folder: dist.FileStore(str(folder / "store"), 2),
    "tcp": lambda dist, folder: dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False),
}


@pytest.mark.parametrize("kind", STORES)
def test_less_than_a_millisecond_is_not_for_ever(dist, tmp_path, kind):
    """torch's stores cut a time to milliseconds, and all but TCPStore take 0 for no limit."""
    one = process_group._Exchange(process_group._Group(STORES[kind](dist, tmp_path), "world", [0, 1], 0), 60)
    one._call = 1
    found = []
    # A daemon, and not waited for without limit: in a store's wait() nothing else can end a thread.
    thread = threading.Thread(target=lambda: found.append(one._wait("verdict", 0.0004)), daemon=True)
    thread.start()
    thread.join(timeout=120)
    assert found == [False]


@pytest.mark.parametrize("given", [datetime.timedelta(0), datetime.timedelta(milliseconds=-1), None])
def test_a_group_without_a_limit_of_its_own_gets_ours(monkeypatch, given):
    """A HashStore or a file takes init_process_group(timeout=timedelta(0)) for no limit; that is no wrong argument."""
    asked = []
    monkeypatch.setattr(process_group, "_verify_default", asked.append)
    assert process_group._initialize_and_verify(lambda **_: "made", None, (), {"timeout": given}) == "made"
    assert asked == [process_group.TIMEOUT]


# ------------------------------------------------------------------------------------- RLHF_PATCHES_VERIFY


def compared_after_every_initialization(found, first="init"):
    for report in found:
        assert "): disabled (disabled by RLHF_PATCHES_DISABLE)" in report[first]
        assert report["initialized"]
        assert report.get("apply again") is None, "a group is compared once"
        assert "): disabled (disabled by RLHF_PATCHES_DISABLE)" in report["init again"]
        assert report["init after revert()"] is None
        assert report["signature"] == "(backend: str | None = None"


def test_by_itself_where_torch_is_imported_after_apply(said_by_torchrun):
    compared_after_every_initialization(said_by_torchrun("by_itself", "apply first", settings=ON, own=ONE_SWITCHED_OFF))


@pytest.mark.parametrize("order", ["torch first", "group first"])
def test_by_itself_where_torch_was_imported_before(said, order):
    found = said("by_itself", order, settings=ON, own=ONE_SWITCHED_OFF)
    compared_after_every_initialization(found, "apply" if order == "group first" else "init")


def never_an_error(found):
    for report in found:
        assert {report.get(what) for what in ("apply", "init", "init again", "init after revert()")} == {None}


@pytest.mark.parametrize("order", ["torch first", "group first"])
def test_by_itself_and_all_are_equal(said, order):
    never_an_error(said("by_itself", order, settings=ON))


@pytest.mark.exhaustive
def test_by_itself_and_all_are_equal_where_torch_is_imported_after_apply(said_by_torchrun):
    never_an_error(said_by_torchrun("by_itself", "apply first", settings=ON))


def test_not_asked_not_done(said):
    for report in said("by_itself", "apply first", own=ONE_SWITCHED_OFF):
        assert report["init"] is report["init again"] is None


def test_one_rank_alone(said):
    (report,) = said("by_itself", "apply first", number=1, settings=ON)
    assert report["init"] is report["init again"] is None


def test_under_the_site_hook_only(said_by_torchrun, installed):
    settings = {**ON, "RLHF_PATCHES_AUTOLOAD": "1"}
    found = said_by_torchrun("by_itself", "site hook", python=installed.python, settings=settings, own=ONE_SWITCHED_OFF)
    compared_after_every_initialization(found)


def test_a_wrong_value_stops_the_run_at_its_first_framework(installed):
    settings = {"RLHF_PATCHES_AUTOLOAD": "1", "RLHF_PATCHES_VERIFY": "maybe"}
    done = installed.run(installed.python, "-c", "import torch", **settings)
    assert done.returncode == 1
    assert "SettingsError: RLHF_PATCHES_VERIFY is 'maybe': expected one of 1, true, yes, on or 0," in done.stderr


def test_this_package_does_not_import_torch():
    code = "import rlhf_patches, sys; rlhf_patches.verify; rlhf_patches.apply(); print('torch' in sys.modules)"
    environment = {"RLHF_PATCHES_VERIFY": "1", "PATH": ""}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
