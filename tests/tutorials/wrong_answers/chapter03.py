"""Answers to the exercises of chapter 03 that must not pass: exercise, code, a part of what is said."""

RULE = """
class Rule(Scheduler):
    def schedule(self):
        schedule = Schedule(self.max_num_batched_tokens, self.max_num_batched_tokens)
        for request in [*ORDER]:
            if request in self.waiting:
                if STOP:
                    break
                self.admit(request)
            seq = request.sequences[0]
            self.commit(schedule.next_tokens(seq, NUM), schedule)
        return schedule
"""


def rule(
    order: str = "self.running, *self.waiting",
    stop: str = "schedule.tokens_left == 0 or len(self.running) == self.max_num_seqs",
    num: str = "seq.num_missing_tokens",
) -> str:
    return RULE.replace("ORDER", order).replace("STOP", stop).replace("NUM", num)


WRONG = {
    "no chunk of A": (
        "03.1",
        'def predict(): return {"A": ["6*", "1*", "1*"], "B": [".", "3", "2*", "1*"]}',
        r"step 1: A is '4' in the table, and \['6\*'\] in yours",
    ),
    "no star": (
        "03.1",
        'def predict(): return {"A": ["4", "2", "1", "1"], "B": [".", "2", "3", "1"]}',
        "step 2: A is '2\\*'",
    ),
    "batches in place of aging": (
        "03.2",
        """
class Aging(Scheduler):
    def priority(self, request):
        return request.arrival // 60, request.params.max_tokens
""",
        "depends on the number of the long one",
    ),
    "shortest first": (
        "03.2",
        """
class Aging(Scheduler):
    def priority(self, request):
        return request.params.max_tokens, request.arrival
""",
        "the long ones 166",
    ),
    "first come, first served": (
        "03.2",
        """
class Aging(Scheduler):
    def priority(self, request):
        return request.arrival
""",
        "all wait 133 steps",
    ),
    "waiting requests first": (
        "03.3",
        rule(order="self.waiting, *self.running"),
        "with Scheduler, .* with Rule",
    ),
    "no seats": ("03.3", rule(stop="schedule.tokens_left == 0"), "budget 1000, 2 seats, step"),
    "one token each": (
        "03.3",
        rule(num="1"),
        "budget 8, 100 seats, step 1: . is '[2-8]' with Scheduler, '1' with Rule",
    ),
    "it admits one request more than it has budget for": (
        "03.3",
        rule(stop="len(self.running) == self.max_num_seqs"),
        "is '.' with Scheduler, '-' with Rule",
    ),
    "it asks for tokens, and not for the budget": (
        "03.3",
        rule(
            stop="not schedule.next_tokens(request.sequences[0], request.sequences[0].num_missing_tokens)"
            " or len(self.running) == self.max_num_seqs"
        ),
        "B is '.' with Scheduler, '.*' with Rule",
    ),
    "it plans nothing": (
        "03.3",
        "class Rule(Scheduler):\n    def schedule(self): return Schedule()",
        "computes nothing",
    ),
}
