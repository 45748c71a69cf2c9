"""Ask of every fact that is shipped whether it holds on this Python: the slice of each function, as released and
edited, gives the code object that its whole module gives, and no edit changes more than its function or moves a line.

``make releases`` runs this on every Python that it finds, for the texts that lie in ``.cache/texts``: those of releases
that were looked at here, so with ``--again`` of all. What was proven once is not asked again. It stands on the standard
library and on what the engine needs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import texts

from rlhf_patches.definitions import registry
from rlhf_patches.definitions.checks import MODULE
from rlhf_patches.definitions.variant import Variant
from rlhf_patches.guards import known, memory, rewriting, slices
from rlhf_patches.guards.edits import Unrecognized
from rlhf_patches.guards.places import Source


def main() -> int:
    """Returns 1 if a fact does not hold."""
    proven = texts.CACHE.parent / "proven" / "{}.{}".format(*sys.version_info)
    slicing = Path(slices.__file__).read_text(encoding="utf-8")
    before = set(proven.read_text().split()) if proven.exists() else set()
    registered, _ = registry.load()
    variants = [v for item in registered if item.plugin == registry.BUILT_IN for v in item.patch.variants]
    wrong, right, unreadable, absent = [], set(), 0, 0
    for package in texts.packages():
        facts = texts.load(package)
        own = [variant for variant in variants if any(m.partition(".")[0] == package for m in variant.modules)]
        for key, text in facts.texts.items():
            places = [place[1] for place in text["functions"].values() if isinstance(place, list)]
            state = known.digest(repr((slicing, key, text, [facts.functions[place] for place in places])))
            if state not in before and not (texts.CACHE / f"{key}.py").exists():
                absent += 1
                continue
            if state not in before:
                said = [*_wrong(package, key, own)]
                unreadable += said == [None]
                wrong += [f"{package}, {key}: {each}" for each in said if each is not None]
            if not wrong:
                right.add(state)
    proven.parent.mkdir(parents=True, exist_ok=True)
    proven.write_text("\n".join(sorted(right)))
    version = sys.version.split()[0]
    print(f"Python {version}: facts of {len(right)} texts hold, {len(right - before)} of them asked now, ", end="")
    print(f"{unreadable} of which are no Python there; {absent} texts are not here; {len(wrong)} facts are wrong")
    for each in wrong[:20]:
        print(each)
    return int(bool(wrong))


def _wrong(package: str, key: str, variants: list[Variant]) -> Iterator[str | None]:
    """What is wrong with what is known of a text; None if this Python does not take it."""
    path = texts.CACHE / f"{key}.py"
    text = path.read_bytes().decode("utf-8", "surrogatepass")
    with memory.parsed_once(kept=4):
        try:
            rewriting.compile_module(text, path.name)
        except Unrecognized:
            yield None
            return
        for module in dict.fromkeys(module for variant in variants for module in variant.modules):
            source = known.look_up(Source(module, path.name, text))
            for qualname, groups in texts.by_function(module, variants).items():
                for group in groups:
                    found = [known.find(change, source) for change in group]
                    try:
                        if qualname != MODULE and all(isinstance(each, tuple) for each in found):
                            texts.check(source, found[0][0], sorted(edit for each in found for edit in each[1]))
                    except Exception as error:
                        yield f"{module}:{qualname}: {type(error).__name__}: {error}"


if __name__ == "__main__":
    sys.exit(main())
