"""Finds where the level of a noisy series changes abruptly. Pure.

A series is compared with itself around each position: within a window a straight line and a jump at the position are
fitted by least squares, and the jump counts if it is far above the noise. The line takes what changes slowly, so that
responses that grow by learning are no jump. The best position splits the series, and both parts are searched again
(narrowest-over-threshold with binary segmentation; Baranowski, Chen, Fryzlewicz, JRSS B 2019, use the same contrast).

- Noise is measured on differences of neighbours, which a jump or a slope hardly touches; where neighbours resemble each
  other it is enlarged by the autocorrelation.
- One or two odd values are no jump: values are clipped to the median of their neighbourhood.

Legend: N values of a series.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]

FEWEST = 3  # values on either side of a jump
SKEW = 4  # one side of a window is at most so many times as long as the other
CURVED = 6  # from so many values on either side the slow change may be a parabola
HOLDS = 0.7  # share of a jump that the narrowest window must show
WINDOWS = (6, 12, 24, 48)  # values on either side that are looked at
NOISES = 5.2  # a jump is above so many standard errors; bench/LOG.md has the false alarms per run


def shifts(values_N: Values, least: float) -> list[int]:
    """Returns the positions at which a new level begins, ascending, each between FEWEST and N - FEWEST.

    least: jumps below this size are not reported, however certain.

    >>> shifts(np.asarray([1.0, 1.1, 1.0, 0.9, 1.0, 3.0, 3.1, 2.9, 3.0, 3.1]), 0.1)
    [5]
    """
    if len(values_N) < 2 * FEWEST:
        return []
    noise = _noise(values_N)
    clipped_N = _clipped(values_N, noise)
    return sorted(_split(clipped_N, 0, len(values_N), _long_noise(clipped_N, noise), least))


def _split(values_N: Values, first: int, last: int, noise: float, least: float) -> Iterator[int]:
    """Yields the jumps between two positions; first is included, last is not."""
    best, best_score = None, NOISES * (1 + 4 / len(values_N))  # the noise of a short series is less well known
    for at in range(first + FEWEST, last - FEWEST + 1):
        nearest = 0.0  # the jump in the narrowest window: what only bends has none there
        for window in WINDOWS:
            before = min(window, at - first, SKEW * (last - at))
            after = min(window, last - at, SKEW * (at - first))
            contrast, norm = _contrast(before, after)
            jump = float(contrast @ values_N[at - before : at + after]) / norm
            nearest = nearest or jump
            score = abs(jump) * norm / max(noise, 1e-9)
            if score > best_score and abs(jump) >= least and nearest / jump >= HOLDS:
                best, best_score = at, score
    if best is not None:
        yield best
        yield from _split(values_N, first, best, noise, least)
        yield from _split(values_N, best, last, noise, least)


@functools.cache
def _contrast(before: int, after: int) -> tuple[Values, float]:
    """Returns the unit vector whose product with the values is the jump beside a line, times the norm; and the norm."""
    degree = 2 if min(before, after) >= CURVED else 1
    at = np.linspace(-1, 1, before + after)
    line = np.linalg.qr(np.stack([at**power for power in range(degree + 1)], axis=1))[0]
    jump = np.concatenate([np.zeros(before), np.ones(after)])
    jump -= line @ (line.T @ jump)
    norm = float(np.linalg.norm(jump))
    return jump / norm, norm


def _noise(values_N: Values) -> float:
    """Returns the standard deviation of the values around their level."""
    differences = np.diff(values_N)
    return 1.4826 * float(np.median(np.abs(differences - np.median(differences)))) / math.sqrt(2)


def _clipped(values_N: Values, noise: float) -> Values:
    padded = np.pad(values_N, 2, mode="edge")
    medians_N = np.median(np.lib.stride_tricks.sliding_window_view(padded, 5), axis=1)
    return np.clip(values_N, medians_N - 3 * noise, medians_N + 3 * noise)


def _long_noise(values_N: Values, noise: float) -> float:
    """Enlarges the noise for a series whose neighbours resemble each other, as if it were a first-order process.

    Differences of such a process have the lag-one autocorrelation (phi - 1) / 2.
    """
    differences = np.diff(values_N)
    differences = np.clip(differences - np.median(differences), -4 * noise, 4 * noise)
    power = float(differences @ differences)
    phi = 1 + 2 * float(differences[1:] @ differences[:-1]) / power if power else 0.0
    phi = min(0.8, max(0.0, phi - 2 / math.sqrt(len(values_N))))  # less a standard error
    own = noise / math.sqrt(1 - phi)  # of the values: var(differences) = 2 var (1 - phi)
    return own * math.sqrt((1 + phi) / (1 - phi))
