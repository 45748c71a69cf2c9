"""Known bugs by words of their symptom: names, descriptions, symptoms, causes, repairs and signatures are searched."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from .bug import KnownBug

_FIELDS = {
    "name": 5.0,
    "bug": 4.0,
    "summary": 3.0,
    "symptom": 3.0,
    "when": 2.0,
    "cause": 1.5,
    "changes_numbers": 1.0,
    "repair": 0.5,
    "what_to_do": 0.5,
}
"""The searched fields, and what a word in each counts."""

_SIGNATURES = 3.0
_SYNONYM = 0.7  # of the weight of the word itself
_LEAST = 0.5  # the part of the words that an entry has to have
_WORD = re.compile(r"[^\W_]+")
_STOP = """
a an and are as at be but by can do does for from get has have i in is it its like me my no not nothing of on or our so
that the their then there they this to too was we were what when where which while who why will with you
"""
_SUFFIXES = ("ations", "ation", "ions", "ion", "ings", "ing", "edly", "ed", "es", "s", "ly", "e")
_SYNONYMS = (
    "identical equal same duplicate repeat copy twice",
    "hang stuck deadlock freeze stall wait forever block",
    "oom memory allocate",
    "nan inf infinite overflow",
    "crash error fail raise exception cannot",
    "complete response sample generate rollout answer",
    "adapter lora peft",
    "resume restart checkpoint continue reload",
    "gradient grad",
    "lr rate",
    "reward score",
    "zero 0",
    "weight parameter param",
    "logprob logp probability logprobs",
    "kl divergence",
    "moe expert mixture router",
    "slow slower synchronize speed",
    "ckpt checkpoint save",
    "import install missing",
    "shuffle order",
    "eval evaluate validation",
    "ref reference",
    "eos end stop",
    "vlm vision image multimodal",
    "ignore ineffective effect",
    "trunc truncate cut",
    "tp tensor",
    "cp context",
    "quantized qlora 4bit",
    "tokenizer processing",
    "scale multiply divide factor times size",
    "frozen freeze requires",
)


_LEFT_OUT = frozenset(_STOP.split())


@functools.cache  # pages have most words many times
def _stem(word: str) -> str:
    return next((word[: -len(end)] for end in _SUFFIXES if word.endswith(end) and len(word) - len(end) >= 4), word)


def _stems(text: str) -> list[str]:
    return [_stem(word) for word in map(str.lower, _WORD.findall(text)) if word not in _LEFT_OUT]


def _groups() -> Mapping[str, set[str]]:
    groups: dict[str, set[str]] = {}
    for line in _SYNONYMS:
        stems = {_stem(word) for word in line.split()}
        for stem in stems:
            groups.setdefault(stem, set()).update(stems - {stem})
    return groups


_OTHERS = _groups()


class Index:
    """Entries by what their words count."""

    def __init__(self, patches: Iterable[KnownBug]) -> None:
        self._entries = [(patch, _weights(patch)) for patch in patches]

    def find(self, words: str, most: int = 10) -> list[KnownBug]:
        """The entries that words describe, the best first.

        Args:
            words: what a user sees: a symptom, an error, a setting.
            most: the most that are returned.
        """
        wanted = list(dict.fromkeys(_stems(words)))
        if not wanted:
            return []
        rare = {
            stem: math.log(1 + len(self._entries) / (1 + sum(stem in weights for _, weights in self._entries)))
            for stem in {each for word in wanted for each in (word, *_OTHERS.get(word, ()))}
        }
        scored = [(_score(wanted, weights, rare), patch) for patch, weights in self._entries]
        best = sorted((each for each in scored if each[0] > 0), key=lambda each: (-each[0], each[1].name))
        return [patch for _, patch in best[:most]]


def _score(wanted: Sequence[str], weights: Mapping[str, float], rare: Mapping[str, float]) -> float:
    found = [_of_word(word, weights, rare) for word in wanted]
    share = sum(each > 0 for each in found) / len(found)
    return sum(found) * share**2 if share >= _LEAST else 0.0


def _of_word(word: str, weights: Mapping[str, float], rare: Mapping[str, float]) -> float:
    own = weights.get(word, 0.0) * rare[word]
    others = (_SYNONYM * weights.get(each, 0.0) * min(rare[each], rare[word]) for each in _OTHERS.get(word, ()))
    return max(own, *others, 0.0)


def _weights(patch: KnownBug) -> dict[str, float]:
    """What each word of an entry counts: by the field that counts most, and a little by how often it occurs."""
    most: dict[str, float] = {}
    times: dict[str, int] = {}
    for text, weight in _texts(patch):
        for stem in _stems(text):
            most[stem] = max(most.get(stem, 0.0), weight)
            times[stem] = times.get(stem, 0) + 1
    return {stem: weight * (1 + 0.2 * math.log(times[stem])) for stem, weight in most.items()}


def _texts(patch: KnownBug) -> Iterator[tuple[str, float]]:
    for field, weight in _FIELDS.items():
        text = getattr(patch, field, "")
        if isinstance(text, str):
            yield text, weight
    for signature in patch.signatures:
        yield f"{signature.exception} {signature.message}", _SIGNATURES
