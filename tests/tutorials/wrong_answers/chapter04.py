"""Answers to the exercises of chapter 04 that must not pass: exercise, code, a part of what is said."""


def admits(name: str, code: str, watermark: float = 0) -> str:
    return f"""
class {name}(Scheduler):
    watermark = {watermark}

    def may_admit(self, request, schedule):
        manager = self.block_manager
        needed = manager.num_blocks_for
        {code}
"""


WRONG = {
    "one way only": (
        "04.1",
        """
def cheaper(n, kv_bytes, bus, a, b):
    return "swap" if n * kv_bytes / bus < n * a + n * n * b else "recompute"
""",
        "18.4 ms to move there and back, 12.0 to compute; you say 'swap'",
    ),
    "no attention": (
        "04.1",
        """
def cheaper(n, kv_bytes, bus, a, b):
    return "swap" if 2 * n * kv_bytes / bus < n * a else "recompute"
""",
        "32,000 tokens .* you say 'recompute'",
    ),
    "nobody enters an empty engine": (
        "04.2",
        admits("Careful", "return bool(self.running) and manager.num_free_blocks > 2"),
        "computes nothing",
    ),
    "a larger watermark": (
        "04.2",
        "class Careful(Scheduler):\n    watermark = 0.3",
        "leave `watermark` at 0",
    ),
    "one request at a time": (
        "04.2",
        admits("Careful", "return not self.running"),
        "waits, and there is room",
    ),
    "it forgets the blocks of the newcomer": (
        "04.2",
        admits("Careful", "return manager.num_free_blocks >= 2 * len(self.running)"),
        "runs, and should wait",
    ),
    "two blocks for the newcomer, too": (
        "04.2",
        admits(
            "Careful",
            "return manager.num_free_blocks - needed(len(request.sequences[0])) >= 2 * (len(self.running) + 1)",
        ),
        "waits, and there is room|computes nothing",
    ),
    "blocks now instead of blocks at the end": (
        "04.3",
        admits("Reserved", "return manager.num_free_blocks >= needed(request.max_len)"),
        "requests were stopped",
    ),
    "one request at a time, never stopped": (
        "04.3",
        admits("Reserved", "return not self.running"),
        "waits, and there is room",
    ),
    "room for the last token": (
        "04.3",
        admits(
            "Reserved",
            "return sum(needed(r.max_len) for r in [*self.running, request]) <= len(manager.blocks)",
        ),
        "waits, and there is room",
    ),
}
