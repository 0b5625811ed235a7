"""Your answers to the exercises of chapter 04. To check them: python -m tutorials.check 04"""

from nanovllm.scheduler import Scheduler

# --- 04.1 ---


def cheaper(n: int, kv_bytes: int, bus: float, a: float, b: float) -> str:
    """ "swap" or "recompute", for a request with n computed tokens.

    A token has `kv_bytes` bytes, the bus moves `bus` bytes per second, and to compute the tokens
    again takes n * a + n * n * b seconds.
    """
    raise NotImplementedError


# --- 04.2 ---


class Careful(Scheduler):
    """Keeps two free blocks for each request that runs, when it admits another one."""

    watermark = 0

    def may_admit(self, request, schedule):
        raise NotImplementedError


# --- 04.3 ---


class Reserved(Scheduler):
    """Admits a request only if all that run, and this one, have their blocks to the end."""

    watermark = 0

    def may_admit(self, request, schedule):
        raise NotImplementedError
