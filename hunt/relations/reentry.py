"""Training that is entered again, as at every rollout, takes the steps that it takes when entered once."""

from hunt.relations import Pair

PAIRS = [
    Pair("2-rollouts", {"rollouts": 1, "of_steps": 4}, {"rollouts": 2, "of_steps": 2}, ("losses",)),
    Pair(
        "2-rollouts-on-2-ranks",
        {"rollouts": 1, "of_steps": 4, "ranks": 2},
        {"rollouts": 2, "of_steps": 2, "ranks": 2},
        ("losses",),
    ),
]
