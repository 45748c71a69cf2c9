"""Every sample is drawn, however many ranks there are, and whether these divide the data set or not."""

from hunt.relations import Pair

PAIRS = [Pair("7-on-2-ranks", {"drawn": 7, "ranks": 1}, {"drawn": 7, "ranks": 2}, ("samples",))]
