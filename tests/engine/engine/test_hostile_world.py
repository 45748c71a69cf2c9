"""Broken, odd and hostile environments: a status with a reason, never an exception out of a framework's import."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import json
import logging
import os
import py_compile
import sys
import sysconfig
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from rlhf_patches import PatchError, Replace, Rewrite, SettingsError, Status
from rlhf_patches.definitions.registry import Registered
from rlhf_patches.engine.engine import Engine
from rlhf_patches.offline.evaluate import inspect

BUG = "def add(a, b):\n    return a - b\n"
FIXED, BROKEN = 3, 1  # add(2, 1)


@pytest.fixture
def rewrite(framework):
    """A patch of ``mod:add``."""

    def make(target="mod:add", **options):
        return framework.patch(Rewrite(framework.path(target), "$A - $B", "$A + $B"), **options)

    return make


def _only(report):
    (row,) = report
    return row


def _both(made, patch):
    """The engine's row and that of static inspection."""
    return _only(made.apply()), _only(inspect([Registered(patch, "tests")]))


# -------------------------------------------------------------------------------------------------- sources


def test_a_target_that_fails_to_import(framework, engine, rewrite):
    framework.write("mod", f"{BUG}raise ZeroDivisionError('theirs')\n")
    made = engine(rewrite())
    assert _only(made.apply()).status is Status.PENDING
    with pytest.raises(ZeroDivisionError, match="theirs"):
        framework.load()
    assert _only(made.report()).status is Status.PENDING


def test_nothing_there_at_all(framework, engine, rewrite):
    framework.write("other", "")
    patch = rewrite()
    for row in _both(engine(patch), patch):
        assert row.status is Status.REFUSED
        assert "1.0 is affected (every version), but there is no module" in row.reason
    with pytest.raises(ModuleNotFoundError):
        framework.load()


def test_a_module_where_a_package_is_expected(framework, engine, rewrite):
    framework.write("mod", BUG)
    patch = rewrite("mod.sub:add")
    for row in _both(engine(patch), patch):
        assert (row.status, "is not a package" in row.reason) == (Status.REFUSED, True)


@pytest.mark.parametrize("imported_first", [True, False])
def test_bytecode_only(framework, engine, rewrite, imported_first):
    file = framework.write("mod", BUG)
    py_compile.compile(str(file), cfile=str(file.with_suffix(".pyc")))
    file.unlink()
    patch = rewrite()
    made = engine(patch)
    if not imported_first:
        made.apply()
    assert framework.load().add(2, 1) == BROKEN
    for row in _both(made, patch):
        assert row.status is Status.REFUSED
        assert "bytecode only" in row.reason
    assert framework.load().add(2, 1) == BROKEN


def test_source_deleted_after_the_import(framework, engine, rewrite):
    file = framework.write("mod", BUG)
    add = framework.load().add
    file.unlink()
    row = _only(engine(rewrite()).apply())
    assert (row.status, "cannot be read" in row.reason) == (Status.REFUSED, True)
    assert add(2, 1) == BROKEN


def test_source_edited_after_the_import(framework, engine, rewrite):
    file = framework.write("mod", BUG)
    add = framework.load().add
    file.write_text(BUG.replace("a - b", "b - a"))
    row = _only(engine(rewrite()).apply())
    assert (row.status, "edited after its import" in row.reason) == (Status.REFUSED, True)
    assert add(2, 1) == BROKEN


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"# \xff\n" + BUG.encode(), "cannot be read"),
        (b"# coding: no-such-codec\n" + BUG.encode(), "cannot be read"),
        (b"# coding: hex\n00", "cannot be read"),
        (BUG.encode() + b"\0", "null bytes"),
        (b"print 'syntax of Python 2'\n" + BUG.encode(), "does not parse"),
        (b"(" * 10_000, "does not parse"),
        (b"", "is not defined"),
        (BUG.encode().replace(b"add", b"other"), "is not defined"),
        (BUG.encode() * 2, "is defined 2 times"),
    ],
)
@pytest.mark.parametrize("imported_first", [True, False])
def test_sources_that_cannot_be_used(framework, engine, rewrite, data, reason, imported_first):
    """The import gives what it gives without us; what was imported before the file went bad stays as it is."""
    file = framework.write("mod", BUG)
    if imported_first:
        framework.load()
    file.write_bytes(data)
    importlib.invalidate_caches()
    patch = rewrite()
    made = engine(patch)
    if not imported_first:
        assert _only(made.apply()).status is Status.PENDING
        try:
            framework.load()
        except (SyntaxError, ValueError, MemoryError, RecursionError):
            pass
        importable = framework.path("mod") in sys.modules
        assert _only(made.report()).status is (Status.REFUSED if importable else Status.PENDING)
    rows = _both(made, patch)
    for row in rows[0 if imported_first else 1 :]:
        assert row.status is Status.REFUSED
        assert reason in row.reason


@pytest.mark.parametrize("encoding", ["latin-1", "utf-8-sig", "utf-8"])
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_encodings_and_line_ends_are_no_obstacle(framework, engine, rewrite, encoding, newline):
    head = "" if encoding == "utf-8-sig" else f"# coding: {encoding}\n"
    file = framework.write("mod", "")
    file.write_bytes(f"{head}NAME = 'é'\n{BUG}".replace("\n", newline).encode(encoding))
    made = engine(rewrite())
    made.apply()
    module = framework.load()
    assert (module.add(2, 1), module.NAME) == (FIXED, "é")


def test_a_read_only_folder(framework, engine, rewrite, monkeypatch):
    """No .pyc can be written. (Root may write everywhere, hence the switch as well.)"""
    framework.write("mod", BUG)
    folder = framework.site / framework.name
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    folder.chmod(0o555)
    try:
        made = engine(rewrite())
        made.apply()
        assert framework.load().add(2, 1) == FIXED
        assert not (folder / "__pycache__").exists()
    finally:
        folder.chmod(0o755)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_source_without_permission(framework, engine, rewrite):
    file = framework.write("mod", BUG)
    framework.load()
    file.chmod(0)
    row = _only(engine(rewrite()).apply())
    assert (row.status, "cannot be read" in row.reason) == (Status.REFUSED, True)


def test_stale_bytecode_is_not_what_we_take_it_for(framework, engine, rewrite):
    """An unchecked .pyc runs other code than the source says: refused, since we compare what runs with the source."""
    file = framework.write("mod", BUG.replace("a - b", "a * b"))
    py_compile.compile(str(file), invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    file.write_text(BUG)
    made = engine(rewrite())
    made.apply()
    assert framework.load().add(2, 3) == 6
    assert _only(made.report()).status is Status.REFUSED


# ------------------------------------------------------------------------------------------------- versions


@pytest.mark.parametrize(
    ("version", "guard", "status", "said"),
    [
        ("0.25.1+cu128.empty", "<=0.25.1", Status.APPLIED, "is affected"),
        ("0.25.1+cu128.empty", "==0.25.1", Status.APPLIED, "is affected"),
        ("0.25.1+cu128.empty", "<0.25.1", Status.UNAFFECTED, "is not affected"),
        ("0.25.1+cu128.empty", "!=0.25.1", Status.UNAFFECTED, "is not affected"),
        ("1.0.dev3", "<1.0", Status.UNAFFECTED, "is not affected"),  # PEP 440: <1.0 leaves out 1.0's own pre-releases
        ("1.0.dev3", "<=1.0", Status.APPLIED, "is affected"),
        ("1.0.dev3", ">=1.0", Status.UNAFFECTED, "is not affected"),
        ("1.0rc1", ">=0.9,<1.1", Status.APPLIED, "is affected"),
        ("1.0rc1", ">=1.0", Status.UNAFFECTED, "is not affected"),
        ("1.0.post1", "<=1.0", Status.UNAFFECTED, "is not affected"),
        ("v1.0", "==1.0", Status.APPLIED, "is affected"),
        ("not-a-version", "<=1.0", Status.APPLIED, "is not PEP 440"),  # unknown: the shape decides
        (None, "<=1.0", Status.APPLIED, "states no version"),
    ],
)
def test_versions_at_the_borders(framework, engine, rewrite, version, guard, status, said):
    framework.write("mod", BUG)
    _remove(framework)
    framework.metadata(version)
    made = engine(rewrite(versions=guard))
    made.apply()
    result = framework.load().add(2, 1)
    row = _only(made.report())
    assert (row.status, row.version) == (status, version)
    assert said in row.reason
    assert result == (FIXED if status is Status.APPLIED else BROKEN)


def _remove(framework):
    """Take the framework's metadata away."""
    for folder in framework.site.glob("*.dist-info"):
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()
    importlib.invalidate_caches()


def _no_file(folder):
    (folder / "METADATA").unlink()


def _empty_file(folder):
    (folder / "METADATA").write_text("")


def _a_folder(folder):
    (folder / "METADATA").unlink()
    (folder / "METADATA").mkdir()


def _not_text(folder):
    (folder / "METADATA").write_bytes(b"\xff\xfe\0")


def _no_permission(folder):
    (folder / "METADATA").chmod(0)


@pytest.mark.parametrize("code", [BUG, BUG.replace("-", "*")])
@pytest.mark.parametrize("damage", [_no_file, _empty_file, _a_folder, _not_text, _no_permission])
def test_damaged_metadata_means_an_unknown_version(framework, engine, rewrite, damage, code):
    if damage is _no_permission and os.geteuid() == 0:
        pytest.skip("root reads everything")
    framework.write("mod", code)
    damage(framework.metadata("1.0"))
    made = engine(rewrite(versions="<=1.0"))
    made.apply()
    module = framework.load()
    row = _only(made.report())
    assert row.version is None
    assert row.status is (Status.APPLIED if code == BUG else Status.UNAFFECTED)
    assert module.add(2, 1) == (FIXED if code == BUG else 2)


@pytest.mark.parametrize(
    ("second", "elsewhere", "version", "said"),
    [
        ("1.0", False, "1.0", "1.0 is affected"),
        ("2.0", False, None, "several versions: 1.0, 2.0"),
        ("1.0", True, "1.0", "1.0 is affected"),
        ("2.0", True, "1.0", "1.0 is affected"),
    ],
)
@pytest.mark.parametrize("elsewhere_first", [True, False])
def test_two_copies_of_the_metadata(
    framework, engine, rewrite, tmp_path, monkeypatch, second, elsewhere, version, said, elsewhere_first
):
    framework.write("mod", BUG)
    if elsewhere:
        other = tmp_path / "elsewhere"
        other.mkdir()
        if elsewhere_first:
            monkeypatch.syspath_prepend(str(other))
        else:
            monkeypatch.setattr(sys, "path", [*sys.path, str(other)])
        site, framework.site = framework.site, other
        framework.metadata(second)
        framework.site = site
    else:
        framework.metadata(second, folder=f"{framework.distribution}-copy.dist-info".replace("-", "_", 1))
        framework.metadata(second, folder=f"{framework.distribution.replace('-', '_')}-0.dist-info")
    patch = rewrite(versions="<2")
    made = engine(patch)
    made.apply()
    assert framework.load().add(2, 1) == FIXED
    for row in _both(made, patch):
        assert row.version == version
        assert said in row.reason


@pytest.mark.parametrize("code", [BUG, BUG.replace("-", "*")])
def test_a_checkout_in_front_of_an_installed_wheel(framework, engine, rewrite, tmp_path, monkeypatch, code):
    """The metadata says 1.0 and not affected, but it is not its code that runs: the shape decides."""
    framework.write("mod", "raise AssertionError('the wheel was imported')")
    checkout = tmp_path / "checkout"
    (checkout / framework.name).mkdir(parents=True)
    (checkout / framework.name / "__init__.py").touch()
    (checkout / framework.name / "mod.py").write_text(code)
    monkeypatch.syspath_prepend(str(checkout))
    patch = rewrite(versions="<1.0")
    made = engine(patch)
    made.apply()
    assert framework.load().add(2, 1) == (FIXED if code == BUG else 2)
    row = _only(made.report())
    assert (row.status, row.version) == (Status.APPLIED if code == BUG else Status.UNAFFECTED, None)
    assert "does not belong to" in row.reason
    assert str(checkout) in row.reason


@pytest.mark.parametrize("guard", ["<=1.0", "<1.0"])
@pytest.mark.parametrize("folder", ["checkout", "check out é"])
def test_an_editable_install(framework, engine, rewrite, tmp_path, monkeypatch, guard, folder):
    """direct_url.json says where the code is, so the version counts."""
    checkout = tmp_path / folder
    (checkout / "src" / framework.name).mkdir(parents=True)
    (checkout / "src" / framework.name / "mod.py").write_text(BUG)
    monkeypatch.setattr(sys, "path", [*sys.path, str(checkout / "src")])
    direct = {"url": checkout.as_uri(), "dir_info": {"editable": True}}
    framework.metadata("1.0").joinpath("direct_url.json").write_text(json.dumps(direct))
    made = engine(rewrite(versions=guard))
    made.apply()
    assert framework.load().add(2, 1) == (FIXED if guard == "<=1.0" else BROKEN)
    row = _only(made.report())
    assert (row.status, row.version) == (Status.APPLIED if guard == "<=1.0" else Status.UNAFFECTED, "1.0")


@pytest.mark.parametrize("direct", ["", "[]", "{", '{"url": 3}', '{"url": "file://x/y", "dir_info": null}', "\0"])
def test_a_damaged_direct_url(framework, engine, rewrite, direct):
    framework.write("mod", BUG)
    framework.metadata("1.0").joinpath("direct_url.json").write_text(direct)
    made = engine(rewrite())
    made.apply()
    assert framework.load().add(2, 1) == FIXED
    assert _only(made.report()).version == "1.0"


# ------------------------------------------------------------------------------------------- odd modules


def test_an_extension_module(engine, framework):
    name = "_json" if "_json" not in sys.builtin_module_names else "_decimal"
    patch = framework.patch(Rewrite(f"{name}:scanstring", "$A - $B", "$A + $B"))
    module = importlib.import_module(name)
    before = dict(vars(module))
    for row in _both(engine(patch), patch):
        assert row.status is Status.REFUSED
        assert "compiled extension" in row.reason or "no source file" in row.reason
    assert dict(vars(module)) == before


def test_a_builtin_module(engine, framework):
    patch = framework.patch(Rewrite("sys:exit", "$A - $B", "$A + $B"))
    for row in _both(engine(patch), patch):
        assert (row.status, "has no source file" in row.reason) == (Status.REFUSED, True)


def test_an_extension_module_that_is_imported_later(engine, framework, rewrite):
    """The loader around the real one must not trouble the import of compiled code."""
    folder = Path(sysconfig.get_config_var("DESTSHARED") or "no-such-folder")
    compiled = sorted(folder.glob("_struct.*.so")) + sorted(folder.glob("_json.*.so"))
    if not compiled:
        pytest.skip("this Python has no compiled modules of its own in files")
    name = compiled[0].name.partition(".")[0]
    framework.write("", "")
    (framework.site / framework.name / compiled[0].name).write_bytes(compiled[0].read_bytes())
    made = engine(rewrite(f"{name}:add"))
    made.apply()
    module = framework.load(name)
    assert type(module.__loader__) is importlib.machinery.ExtensionFileLoader
    row = _only(made.report())
    assert (row.status, "compiled extension" in row.reason) == (Status.REFUSED, True)


class _Grumpy(ModuleType):
    def __getattr__(self, name):
        raise RuntimeError(f"nobody asks me for {name}")


class _Hermetic(ModuleType):
    def __getattribute__(self, name):
        raise RuntimeError(f"nobody asks me for {name}")


class _Slotted:
    __slots__ = ()


@pytest.mark.parametrize(
    "make", [ModuleType, _Grumpy, _Hermetic, lambda name: _Slotted(), lambda name: SimpleNamespace()]
)
@pytest.mark.parametrize("applied_first", [True, False])
def test_things_in_sys_modules_without_a_spec(framework, engine, rewrite, make, applied_first):
    framework.write("mod", BUG)
    made = engine(rewrite())
    if applied_first:
        made.apply()
    thing = make(framework.path("mod"))
    if isinstance(thing, ModuleType):
        object.__getattribute__(thing, "__dict__").pop("__spec__", None)
    sys.modules[framework.path("mod")] = thing
    row = _only(made.apply())
    assert row.status is Status.REFUSED
    assert "has no __spec__" in row.reason
    assert _only(made.report()).status is Status.REFUSED


def test_none_in_sys_modules(framework, engine, rewrite):
    """Python's way to forbid an import."""
    framework.write("mod", BUG)
    sys.modules[framework.path("mod")] = None
    made = engine(rewrite())
    assert _only(made.apply()).status in (Status.PENDING, Status.ABSENT)
    with pytest.raises(ModuleNotFoundError):
        framework.load()


def test_a_module_with_a_grumpy_getattr(framework, engine, rewrite):
    framework.write("mod", f"def __getattr__(name):\n    raise RuntimeError(name)\n\n{BUG}")
    made = engine(rewrite())
    made.apply()
    assert framework.load().add(2, 1) == FIXED
    assert _only(made.report()).status is Status.APPLIED


@pytest.mark.parametrize("hermetic", [True, False])
def test_a_class_with_a_hostile_metaclass(framework, engine, hermetic):
    """Its members are found without comparing, hashing or setting anything; one that hides its __dict__ is given up."""
    framework.write(
        "mod",
        f"""\
        def refuse(*args):
            raise RuntimeError("leave me alone")

        class Meta(type):
            __setattr__ = __instancecheck__ = __eq__ = __hash__ = __bool__ = __getattr__ = refuse
            if {hermetic}:
                __getattribute__ = refuse

        class Thing(metaclass=Meta):
            def __init__(self, b):
                self.b = b - 0

            def add(self, a):
                return a - self.b
        """,
    )
    made = engine(
        framework.patch(
            Rewrite(framework.path("mod:Thing.__init__"), "$A - 0", "$A + 0"),
            Rewrite(framework.path("mod:Thing.add"), "$A - $B", "$A + $B"),
        )
    )
    made.apply()
    thing = framework.load().Thing(1)
    row = _only(made.report())
    assert row.status is (Status.FAILED if hermetic else Status.APPLIED)
    assert ("leave me alone; nothing was changed" in row.reason) is hermetic
    assert thing.add(2) == (BROKEN if hermetic else FIXED)


# ----------------------------------------------------------------------------------------- implementations


@pytest.mark.parametrize("kind", ["replace", "wrap", "wrap by signature"])
def test_a_function_that_nobody_has_read_is_refused(framework, engine, kind):
    """It has another body, or other parameters, than the one for which the implementation was written."""
    from rlhf_patches import Replace, Wrap, fingerprint

    framework.write("mod", BUG.replace("(a, b)", "(a, b, c=0)"))
    framework.write("fixes", "def add(*args): return 3\ndef around(wrapped, instance, args, kwargs): return 3\n")
    target, around, read = framework.path("mod:add"), framework.path("fixes:around"), {fingerprint(BUG, "add"): "1.0"}
    change = {
        "replace": Replace(target, framework.path("fixes:add"), read),
        "wrap": Wrap(target, around, fingerprints=read),
        "wrap by signature": Wrap(target, around, signature="(a, b)", signature_suffices="it looks at nothing else"),
    }[kind]
    add = framework.load().add
    row = _only(engine(framework.patch(change)).apply())
    assert row.status is Status.REFUSED
    expected = "has the signature (a, b, c=0), expected (a, b)" if "sig" in kind else "which no reviewed release has"
    assert expected in row.reason
    assert add(2, 1) == BROKEN


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, ".fixes:add: there is no module framework"),
        ("import no_such_module_anywhere", "ModuleNotFoundError"),
        ("raise ZeroDivisionError('in the fixes')", "ZeroDivisionError: in the fixes"),
        ("def other(): pass", ".fixes:add: add is not defined there"),
        ("def add(:", "SyntaxError"),
        ("import sys; sys.exit(3)", "SystemExit"),
    ],
)
@pytest.mark.parametrize("kind", ["replace", "uses"])
@pytest.mark.parametrize("imported_first", [True, False])
def test_an_implementation_that_cannot_be_imported(framework, engine, text, said, kind, imported_first):
    from rlhf_patches import fingerprint

    framework.write("mod", BUG)
    if text is not None:
        framework.write("fixes", text)
    change = {
        "replace": Replace(framework.path("mod:add"), framework.path("fixes:add"), {fingerprint(BUG, "add"): "1.0"}),
        "uses": Rewrite(
            framework.path("mod:add"), "$A - $B", "$FIX($A, $B)", uses={"FIX": framework.path("fixes:add")}
        ),
    }[kind]
    made = engine(framework.patch(change))
    if imported_first:
        framework.load()
    made.apply()
    add = framework.load().add
    row = _only(made.report())
    assert row.status is Status.FAILED
    assert said in row.reason
    assert "nothing was changed" in row.reason
    assert add(2, 1) == BROKEN
    framework.write("fixes", "def add(a, b):\n    return a + b\n")
    sys.modules.pop(framework.path("fixes"), None)
    assert _only(made.apply()).status is Status.APPLIED
    assert add(2, 1) == FIXED


# -------------------------------------------------------------------------------------------- strict mode


@pytest.mark.parametrize("by", ["argument", "variable"])
def test_strict_mode_raises_from_apply(framework, engine, rewrite, monkeypatch, by):
    framework.write("mod", BUG.replace("-", "*"))
    framework.load()
    made = engine(rewrite())
    if by == "variable":
        monkeypatch.setenv("RLHF_PATCHES_STRICT", "1")
    with pytest.raises(PatchError, match=f"{framework.name}-bug was refused: .* 0 times, expected 1"):
        made.apply(strict=True if by == "argument" else None)
    assert not issubclass(PatchError, ImportError)


@pytest.mark.parametrize("by", ["argument", "variable"])
def test_strict_mode_fails_the_import(framework, engine, rewrite, monkeypatch, by):
    framework.write("mod", BUG.replace("-", "*"))
    if by == "variable":
        monkeypatch.setenv("RLHF_PATCHES_STRICT", "1")
    made = engine(rewrite())
    made.apply(strict=True if by == "argument" else None)
    for _ in range(2):
        with pytest.raises(PatchError, match=f"{framework.name}-bug was refused"):
            framework.load()
        assert framework.path("mod") not in sys.modules
    made.apply(strict=False)
    assert framework.load().add(2, 1) == 2


def test_strict_false_overrides_the_variable(framework, engine, rewrite, monkeypatch):
    framework.write("mod", BUG.replace("-", "*"))
    monkeypatch.setenv("RLHF_PATCHES_STRICT", "1")
    made = engine(rewrite())
    made.apply(strict=False)
    framework.load()
    assert _only(made.report()).status is Status.REFUSED


@pytest.mark.parametrize("case", ["applied", "outside", "absent", "disabled", "unknown and mended"])
def test_strict_mode_raises_for_problems_only(framework, engine, rewrite, monkeypatch, case):
    if case != "absent":
        framework.write("mod", BUG if case != "unknown and mended" else BUG.replace("-", "*"))
    if case in ("unknown and mended", "absent"):
        _remove(framework)
    patch = rewrite(versions="<1.0" if case == "outside" else "")
    if case == "disabled":
        monkeypatch.setenv("RLHF_PATCHES_DISABLE", patch.name)
    made = engine(patch)
    made.apply(strict=True)
    if case != "absent":
        framework.load()
        assert (
            _only(made.apply(strict=True)).status
            is {
                "applied": Status.APPLIED,
                "outside": Status.UNAFFECTED,
                "disabled": Status.DISABLED,
                "unknown and mended": Status.UNAFFECTED,
            }[case]
        )


def test_one_bad_patch_does_not_stop_the_others(framework, engine, rewrite):
    framework.write("mod", BUG)
    framework.write("other", BUG.replace("-", "*"))
    made = engine(rewrite("other:add", name="a-first"), rewrite("mod:add", name="b-second"))
    framework.load("other")
    framework.load()
    with pytest.raises(PatchError):
        made.apply(strict=True)
    report = made.report()
    assert [row.status for row in report] == [Status.REFUSED, Status.APPLIED]
    assert framework.load().add(2, 1) == FIXED


# ------------------------------------------------------------------------------------------------ settings


def test_a_variable_that_goes_wrong_after_apply_is_no_exception_from_an_import(framework, engine, rewrite, monkeypatch):
    framework.write("mod", BUG)
    made = engine(rewrite())
    made.apply()
    monkeypatch.setenv("RLHF_PATCHES_DISABLE", "no-such-patch")
    add = framework.load().add
    row = _only(made.report())
    assert (row.status, "no-such-patch" in row.reason) == (Status.FAILED, True)
    assert add(2, 1) == BROKEN
    with pytest.raises(SettingsError):
        made.apply()


@pytest.mark.parametrize("variable", ["DISABLE", "ONLY", "STRICT", "LOG", "TYPO"])
def test_a_wrong_variable_is_an_error_before_anything_changes(framework, engine, rewrite, monkeypatch, variable):
    framework.write("mod", BUG)
    add = framework.load().add
    made = engine(rewrite())
    monkeypatch.setenv(f"RLHF_PATCHES_{variable}", "nonsense")
    with pytest.raises(SettingsError, match=f"RLHF_PATCHES_{variable}"):
        made.apply()
    assert add(2, 1) == BROKEN
    assert _only(made.report()).status is Status.INACTIVE


# --------------------------------------------------------------------------------------------- log messages


@pytest.fixture
def messages(caplog):
    """The warnings that were logged so far."""
    caplog.set_level(logging.DEBUG, "rlhf_patches")
    return lambda: [r.getMessage() for r in caplog.records if r.name == "rlhf_patches" and r.levelno >= logging.WARNING]


def _refused(framework, rewrite, engine):
    framework.write("mod", BUG.replace("-", "*"))
    return engine(rewrite())


def _failed(framework, rewrite, engine):
    from rlhf_patches import fingerprint

    framework.write("mod", BUG)
    return engine(
        framework.patch(Replace(framework.path("mod:add"), "no_such_module:f", {fingerprint(BUG, "add"): "1.0"}))
    )


@pytest.mark.parametrize("problem", [_refused, _failed])
def test_problems_are_logged_once(framework, rewrite, engine, messages, problem):
    made = problem(framework, rewrite, engine)
    made.apply()
    assert messages() == []
    framework.load()
    for _ in range(3):
        made.apply()
        made.report()
    (message,) = messages()
    assert message.startswith(f"{problem.__name__[1:]} {framework.name}-bug: ")
    assert "nothing was changed" in message


@pytest.mark.parametrize(
    ("environment", "spoken"),
    [
        ({}, True),
        ({"RANK": "0"}, True),
        ({"RANK": "1"}, False),
        ({"RANK": "1", "RLHF_PATCHES_LOG": "warning:all"}, True),
        ({"RANK": "1", "RLHF_PATCHES_LOG": "warning"}, False),
        ({"SLURM_PROCID": "3"}, False),
        ({"RANK": "0", "SLURM_PROCID": "3"}, True),
        ({"OMPI_COMM_WORLD_RANK": "1"}, False),
    ],
)
@pytest.mark.parametrize("problem", ["refused", "plugin"])
def test_who_speaks(framework, rewrite, engine, messages, monkeypatch, environment, spoken, problem):
    from rlhf_patches.definitions.registry import PluginFailure

    for name in ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if problem == "refused":
        made = _refused(framework, rewrite, engine)
        framework.load()
    else:
        made = Engine(load=lambda: ([], [PluginFailure("some-plugin", "it is broken")]))
    made.apply()
    made.report()
    assert len(messages()) == spoken


def test_applied_patches_warn_of_nothing(framework, rewrite, engine, messages):
    framework.write("mod", BUG)
    made = engine(rewrite())
    made.apply()
    framework.load()
    made.apply()
    assert messages() == []


@pytest.mark.parametrize(("level", "count"), [("debug", 1), ("warning", 1), ("error", 0), ("off", 0)])
def test_log_levels_from_the_environment(framework, rewrite, engine, monkeypatch, capsys, level, count):
    from rlhf_patches.engine import log

    made = _refused(framework, rewrite, engine)
    framework.load()
    monkeypatch.setenv("RLHF_PATCHES_LOG", level)
    logger = log.logger()
    before = logger.level, logger.propagate, list(logger.handlers)
    logger.handlers.clear()
    try:
        log.configure()
        made.apply()
    finally:
        logger.level, logger.propagate, logger.handlers[:] = before
        logger.setLevel(before[0])
    assert capsys.readouterr().err.count("[rlhf_patches] refused") == count
