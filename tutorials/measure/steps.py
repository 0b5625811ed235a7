"""What a benchmark makes of an engine's steps: the share of the floor, the share of the host.

Imports no torch. The cost model is `nanovllm.topics.simulator.cost_model`.
"""

from typing import NamedTuple

from nanovllm.topics.simulator.cost_model import Hardware, Items, Shape, work_of


class Step(NamedTuple):
    """One step that the engine ran."""

    items: Items
    sampled: int  # number of sequences that drew a token
    seconds: float = 0.0  # the whole step
    host_seconds: float = 0.0  # the part of it that Python spent on preparing and delivering

    @property
    def kind(self) -> str:
        """decode: every sequence computed one token. prefill: any other step."""
        return "decode" if all(num_tokens == 1 for num_tokens, _ in self.items) else "prefill"


def roofline(shape: Shape, steps: list[Step], hardware: Hardware) -> dict[str, dict]:
    """For decode steps and for prefill steps: the seconds they took, and the shares of the floor
    and of the host."""
    report = {}
    for kind in ("decode", "prefill"):
        chosen = [step for step in steps if step.kind == kind]
        floor = sum(hardware.floor(work_of(shape, step.items, step.sampled)) for step in chosen)
        seconds = sum(step.seconds for step in chosen)
        host = sum(step.host_seconds for step in chosen)
        report[kind] = {"steps": len(chosen), "seconds": seconds, "floor_seconds": floor}
        if chosen:
            report[kind] |= {"floor_share": floor / seconds, "host_share": host / seconds}
    return report
