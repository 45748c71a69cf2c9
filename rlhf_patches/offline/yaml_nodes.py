"""Parse YAML to PyYAML's nodes, each with its line. No object is constructed."""

from __future__ import annotations

import yaml

# libyaml's parser takes a twentieth of the time, but some builds of PyYAML do not have it.
_LOADER: type[yaml.SafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class NotYaml(Exception):
    """A text is not valid YAML, or has several documents; the message has the place, the line and the reason."""


def compose(text: str, place: str) -> yaml.Node | None:
    """The root node of a YAML document; None for an empty one.

    Raises:
        NotYaml: the text is not valid YAML, or has several documents.
    """
    try:
        roots = [*yaml.compose_all(text, Loader=_LOADER)]
    except yaml.YAMLError as error:
        raise not_yaml(error, place) from error
    except (RecursionError, ValueError) as error:
        raise NotYaml(f"{place}: invalid YAML: {type(error).__name__}: {error!s:.200}") from error
    if len(roots) > 1:
        raise NotYaml(f"{at(place, roots[1])}: a second YAML document begins; expected one")
    return roots[0] if roots else None


def not_yaml(error: yaml.YAMLError, place: str) -> NotYaml:
    """The same error in one line, with the place and the line."""
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None) or str(error)
    return NotYaml(f"{place}:{mark.line + 1 if mark else 1}: invalid YAML: {' '.join(problem.split()):.200}")


def line_of(node: yaml.Node) -> int:
    """The line number of a node, from 1."""
    return int(node.start_mark.line) + 1


def at(place: str, node: yaml.Node) -> str:
    """The place with the line of a node."""
    return f"{place}:{line_of(node)}"
