"""Random numbers by counting: each depends on where it is used and on nothing else."""

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15


def uniform(seed: int, choice: int, position: int) -> float:
    """Return the number in [0, 1) that decides token ``position`` of a choice.

    A multiple of 2**-24, so that float32 holds it exactly. ``seed`` is unsigned, 64 bits.
    """
    state = 0
    for word in (seed, choice, position):
        state = _mix(state ^ word)
    return (state >> 40) * 2.0**-24


def _mix(state: int) -> int:
    """One step of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014): a bijection of 64 bits."""
    state = (state + _GAMMA) & _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)
