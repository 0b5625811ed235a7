"""Checks of chapter 19: an old card, what a router does not know, replicas that come and go."""

from collections import Counter
from collections.abc import Callable
from statistics import mean

from nanovllm import MACHINES, LeastLoaded, PrefixAffinity, Router, Run, Served, simulate
from nanovllm.config import Config
from nanovllm.sampling_params import SamplingParams
from nanovllm.scheduler import Scheduler
from nanovllm.sequence import Request
from nanovllm.topics.simulator.replica import Replica
from nanovllm.topics.simulator.simulation import Simulation
from tutorials.exercises.checks.expect import expect
from tutorials.simulation.metrics import latency
from tutorials.simulation.workloads import lognormal, multi_turn, poisson, workload

NAMES = ["old", "new", "red", "blue", "green"]
NUM_USERS = 2000


def request_of(number: int, user: object = None) -> Request:
    params = SamplingParams(extra_args={"user": user})
    return Request(str(number), None, [1 + number % 7] * 20, params)


# --- 19.1 ---
def seconds_on_two(router_cls: type[Router]) -> float:
    """The mean latency; replica 1 is half as fast as replica 0."""
    fast = MACHINES["h100"]
    jobs = workload(poisson(40), lognormal(300, 100, 0.8), 300)
    served = [Served(job) for job in jobs]
    machines = [fast, fast.slower(2.0)]
    config = Config(model="qwen3-8b")
    replicas = [Replica(config, machine, Scheduler, False, served) for machine in machines]
    Simulation(served, replicas, router_cls).run(keep_steps=False)
    return mean(map(latency, served))


def check_1(answers) -> None:
    router, faster, near = (
        type("Fourfold", (answers.Weighted,), {"speeds": speeds})(16, 100)
        for speeds in ({0: 2.0, 1: 1.0}, {"a": 4.0, "b": 1.0, "c": 1.5}, {"a": 1.01, "b": 1.0})
    )
    cases = [
        (router, {0: 0, 1: 0}, 0),
        (router, {0: 2, 1: 1}, 0),
        (router, {0: 3, 1: 0}, 1),
        (router, {0: 5, 1: 2}, 0),
        (router, {1: 2, 0: 5}, 0),
        (router, {0: 6, 1: 2}, 1),
        (router, {1: 3}, 1),
        (faster, {"a": 3, "b": 0, "c": 1}, "a"),
        (faster, {"b": 1, "c": 3, "a": 9}, "b"),
        (near, {"a": 99, "b": 98}, "b"),
        (near, {"a": 98, "b": 98}, "a"),
    ]
    for one, loads, right in cases:
        chosen = one.choose(request_of(0), dict(loads))
        what = f"loads {loads} and speeds {one.speeds}"
        expect(chosen == right, f"with {what}, {right!r} should be chosen, not {chosen!r}")
    weighted, least = seconds_on_two(answers.Weighted), seconds_on_two(LeastLoaded)
    text = f"requests take {weighted:.2f} s on average, and with LeastLoaded {least:.2f} s"
    expect(weighted < 0.95 * least, text)


# --- 19.2 ---
class Table(PrefixAffinity):
    """What is right: how much of a prompt is in the table of a replica that was chosen."""

    def tokens_expected(self, request: Request, name: object) -> int:
        cache = self.caches.get(name)
        return self.block_size * cache.num_found(self.prefixes(request)) if cache else 0


def conversations(num_blocks: int, router_cls: type[Router], block_size: int = 16) -> Run:
    """Thirty of them on four replicas, each with this number of blocks."""
    lengths = lognormal(150, 40, 0.8)
    talks = multi_turn(poisson(6), lengths, 30, turns=6, think=4, max_model_len=2048)
    sizes = dict(num_blocks=num_blocks, block_size=block_size, max_model_len=2048)
    config = Config(model="qwen3-8b", **sizes)
    return simulate(talks, config, replicas=4, router_cls=router_cls)


def check_2(answers) -> None:
    made = []

    class Kept(answers.Noting):
        def __init__(self, *args):
            super().__init__(*args)
            self.right: dict[str, int] = {}
            self.table = Table(*args)
            made.append(self)

        def choose(self, request, loads):
            chosen = super().choose(request, loads)
            self.right[request.request_id] = self.table.tokens_expected(request, chosen)
            self.table.remember(loads)
            self.table.caches[chosen].add(self.prefixes(request))
            return chosen

    for num_blocks, block_size in ((4000, 16), (150, 32)):
        run = conversations(num_blocks, Kept, block_size)
        usual = conversations(num_blocks, PrefixAffinity, block_size)
        same = [one.replica for one in run.requests] == [one.replica for one in usual.requests]
        expect(same, f"{num_blocks} blocks: it chooses others than PrefixAffinity")
        for i in range(len(run.requests)):
            right, said = made[-1].right[str(i)], made[-1].expected.get(str(i))
            where = f"{num_blocks} blocks, request {i}"
            text = f"{where}: the table of its replica has {right} tokens, expected says {said}"
            expect(said == right, text)


# --- 19.3 ---
def homes(router: Router, names: list[str], kind: Callable, first: int = 0) -> dict[int, str]:
    """Of each user. Loads change all the time."""
    found = {}
    for user in range(NUM_USERS):
        loads = {name: (user * 7 + i * first) % 5 for i, name in enumerate(names)}
        found[user] = router.choose(request_of(user + first, kind(user)), loads)
    return found


def homes_in_another_process(answers, kind: Callable) -> dict[int, str]:
    """With a `hash` as there: numbers have the same, and texts have others."""
    answers.hash = lambda value: hash(value if isinstance(value, int) else (value, "another"))
    found = homes(answers.Steady(16, 100), NAMES, kind)
    del answers.hash
    return found


def check_3(answers) -> None:
    judge_steady(answers, int)
    judge_steady(answers, "user {}".format)


def judge_steady(answers, kind: Callable) -> None:
    before = homes(answers.Steady(16, 100), NAMES, kind)
    for name, count in sorted(Counter(before.values()).items()):
        fair = NUM_USERS / len(NAMES)
        text = f"replica {name!r} gets {count} of {NUM_USERS} users, about {fair:.0f} would be fair"
        expect(0.8 * fair < count < 1.2 * fair, text)
    expect(len({*before.values()}) == len(NAMES), "there are replicas that get no user")
    again = homes(answers.Steady(16, 100), NAMES[::-1], kind, first=3)
    moved = sum(before[user] != again[user] for user in before)
    text = f"another router, which sees other requests and loads, sends {moved} users elsewhere"
    expect(moved == 0, text)
    again = homes_in_another_process(answers, kind)
    moved = sum(before[user] != again[user] for user in before)
    text = f"a router in another process, where `hash` of a text is another, sends {moved} users elsewhere"
    expect(moved == 0, text)
    for gone in NAMES:
        left = homes(answers.Steady(16, 100), [name for name in NAMES if name != gone], kind)
        moved = sum(before[user] not in (gone, left[user]) for user in before)
        text = f"replica {gone!r} goes, and {moved} users of the others move, too"
        expect(moved == 0, text)
