"""Checks of chapter 04: a table by hand, blocks to grow into, blocks to the end."""

from functools import cache

from nanovllm.scheduler import Scheduler
from tutorials.exercises.checks.expect import expect
from tutorials.play import Cells, num_preemptions, play, random_jobs, tokens

MEMORY = {seed: dict(num_blocks=36 + 4 * seed, caching=False) for seed in (1, 2, 3)}


def check_1(answers) -> None:
    log = play([("A", 0, 6, 6), ("B", 0, 5, 5)], num_blocks=4)
    said = answers.predict()
    for name in "AB":
        right = [cells[name] for cells in log if name in cells]
        yours = said.get(name) or []
        for i, cell in enumerate(right):
            sentence = f"step {i + 1}: {name} is {cell!r} in the table, and {yours[i : i + 1]}"
            expect(yours[i : i + 1] == [cell], f"{sentence} in yours")
        what = f"{name} has {len(yours)} cells, and ends in step {len(right)}"
        expect(len(yours) == len(right), what)


@cache
def log_of(reference: type[Scheduler], seed: int) -> list[Cells]:
    return play(random_jobs(100, seed), reference, **MEMORY[seed])


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
        log = play(random_jobs(100, seed), answers.Careful, **MEMORY[seed])
        compare("two blocks each", log, log_of(TwoEach, seed))
    play([("A", 0, 8, 1)], answers.Careful, num_blocks=2, caching=False)  # none is left


def check_3(answers) -> None:
    for seed in (1, 2, 3):
        # seed 1: as in the chapter
        log = play(random_jobs(100, seed), answers.Reserved, **MEMORY[seed])
        stopped = num_preemptions(log)
        computed = sum(map(tokens, log))
        expect(stopped == 0, f"requests were stopped {stopped} times, {computed:,} tokens computed")
        compare("blocks to the end", log, log_of(ToTheEnd, seed))
