"""Checks of chapter 04: two ways back, blocks to grow into, blocks to the end."""

from functools import cache

from nanovllm.scheduler import Scheduler
from tutorials.exercises.checks.expect import expect
from tutorials.play import Cells, num_preemptions, play, random_jobs, tokens

MEMORY = dict(num_blocks=40, caching=False)


def check_1(answers) -> None:
    cases = (  # both ways together: 9.2 ms, 18.3 ms, 73 ms, ...; computing: 2 ms, 12 ms, 36 ms, ...
        (1000, 114_688, 25e9, 2.4e-6, 3e-10, "recompute"),
        (2000, 114_688, 25e9, 5.4e-6, 3e-10, "recompute"),
        (8000, 114_688, 25e9, 2.4e-6, 3e-10, "recompute"),
        (32_000, 114_688, 25e9, 2.4e-6, 3e-10, "swap"),
        (1000, 2_560, 4e9, 3e-5, 1e-8, "swap"),
    )
    for n, kv_bytes, bus, a, b, right in cases:
        said = answers.cheaper(n, kv_bytes, bus, a, b)
        moved = 2 * n * kv_bytes / bus * 1000
        again = (n * a + n * n * b) * 1000
        times = f"{n:,} tokens take {moved:.1f} ms to move there and back, {again:.1f} to compute"
        expect(said == right, f"{times}; you say {said!r}")


@cache
def log_of(reference: type[Scheduler], seed: int) -> list[Cells]:
    return play(random_jobs(100, seed), reference, **MEMORY)


def compare(name: str, said: list[Cells], right: list[Cells]) -> None:
    """Both must admit the same requests in the same steps."""
    for i, (mine, yours) in enumerate(zip(right, said), 1):
        for request in mine.keys() - {"free"}:
            waits = mine[request] == ".", yours.get(request) == "."
            if waits[0] != waits[1]:
                verdict = "waits, and there is room" if waits[1] else "runs, and should wait"
                expect(False, f"step {i}: {request} {verdict} by the rule of {name}")
    expect(len(right) == len(said), f"{len(said)} steps instead of {len(right)}")


class TwoEach(Scheduler):
    watermark = 0

    def may_admit(self, request, schedule):
        manager = self.block_manager
        left = manager.num_free_blocks - manager.num_blocks_for(len(request.sequences[0]))
        return left >= 2 * len(self.running)


class ToTheEnd(Scheduler):
    watermark = 0

    def may_admit(self, request, schedule):
        needed = self.block_manager.num_blocks_for
        at_the_end = sum(needed(r.max_len - 1) for r in [*self.running, request])
        return at_the_end <= len(self.block_manager.blocks)


def check_2(answers) -> None:
    expect(answers.Careful.watermark == 0, "leave `watermark` at 0: the rule takes its place")
    for seed in (1, 2, 3):
        log = play(random_jobs(100, seed), answers.Careful, **MEMORY)
        compare("two blocks each", log, log_of(TwoEach, seed))


def check_3(answers) -> None:
    for seed in (1, 2, 3):
        # seed 1: as in the chapter
        log = play(random_jobs(100, seed), answers.Reserved, **MEMORY)
        stopped = num_preemptions(log)
        computed = sum(map(tokens, log))
        expect(stopped == 0, f"requests were stopped {stopped} times, {computed:,} tokens computed")
        compare("blocks to the end", log, log_of(ToTheEnd, seed))
