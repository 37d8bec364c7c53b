"""Is B faster than A? From paired timings: an estimate, an interval, and a verdict that comes from the interval alone.

A round runs A and B one after the other, so that both meet about the same machine; its ratio is B's time / A's. If B does not
differ from A, then a ratio is as likely above 1 as below, equally far. That is all that Wilcoxon's signed-rank test assumes: no
bell curve, and one round that met a busy machine counts as one round, however slow it was. Its distribution is counted out
exactly. The estimate that belongs to it (Hodges and Lehmann) is the median of all averages of two rounds, and its interval
leaves out 1 exactly when the test sees a difference. Standard library only.
"""

import math
import statistics
from collections import namedtuple

KEEP, REVERT, SAME = "keep", "revert", "no difference"

ERROR_RATE = 0.02  # how often a change that changes nothing is called `keep` or `revert`: half as often each
LEAST_GAIN = 0.005 # a gain below this is no difference worth having, however sure


def quartiles(values):
    """(lower quartile, median, upper quartile)"""
    if len(values) == 1:
        return values[0], values[0], values[0]
    return tuple(statistics.quantiles(values, n=4, method="inclusive"))


def signed_rank_counts(n):
    """counts[w] = how many of the 2^n choices of signs make the ranks 1..n with a plus add up to w."""
    counts = [1]
    for rank in range(1, n + 1):
        counts = [(counts[w] if w < len(counts) else 0) + (counts[w - rank] if w >= rank else 0) for w in range(len(counts) + rank)]
    return counts


def fewest_rounds(error_rate=ERROR_RATE):
    """With fewer rounds than this not even a clear difference can be told from chance."""
    return math.ceil(1 + math.log2(1 / error_rate))


def cut_of(n, error_rate):
    """The largest k for which a sum of ranks below k has a probability of at most error_rate / 2. 0: there is none."""
    below, total, counts = 0, 2 ** n, signed_rank_counts(n)
    for k, count in enumerate(counts):
        below += count
        if below / total > error_rate / 2:
            return k
    return len(counts)


Comparison = namedtuple("Comparison", "ratio low high rounds verdict why")


def compare(before, after, error_rate=ERROR_RATE, least_gain=LEAST_GAIN):
    """before[i] and after[i]: the times of round i. ratio: after / before, with its interval low..high."""
    if len(before) != len(after) or not before:
        raise ValueError("compare: as many timings before as after, and at least one")
    if not all(math.isfinite(t) and t > 0 for t in [*before, *after]):
        raise ValueError("compare: a timing is not a positive number")
    logs = [math.log(b / a) for a, b in zip(before, after)]
    n = len(logs)
    averages = sorted((logs[i] + logs[j]) / 2 for i in range(n) for j in range(i, n))
    k = cut_of(n, error_rate)
    ratio = math.exp(statistics.median(averages))
    sure = f"{100 * (1 - error_rate):g}%"
    if k == 0:
        why = f"{n} round{'s' if n > 1 else ''} cannot tell at {sure}; {fewest_rounds(error_rate)} are the fewest"
        return Comparison(ratio, math.exp(min(averages)), math.exp(max(averages)), n, SAME, why)
    low, high = math.exp(averages[k - 1]), math.exp(averages[-k])
    if low <= 1 <= high:
        verdict, why = SAME, f"the {sure} interval holds 1"
    elif abs(ratio - 1) < least_gain:
        verdict, why = SAME, f"surely not 1, but by less than {100 * least_gain:g}%"
    elif ratio < 1:
        verdict, why = KEEP, f"the whole {sure} interval is faster"
    else:
        verdict, why = REVERT, f"the whole {sure} interval is slower"
    return Comparison(ratio, low, high, n, verdict, why)
