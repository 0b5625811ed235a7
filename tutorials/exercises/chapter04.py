"""Your answers to the exercises of chapter 04. To check them: python -m tutorials.check 04"""

from nanovllm.scheduler import Scheduler


# --- 04.1 ---
def predict() -> dict[str, list[str]]:
    """The cells of A and of B, step by step, such as {"A": ["6*", ...], "B": [...]}."""
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
