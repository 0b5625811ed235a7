"""Answers: the tokens of the jobs, and what drafts of them would bring. Imports no torch."""

from collections.abc import Sequence as Tokens
from typing import Any

from nanovllm.schedule import Schedule
from nanovllm.sequence import Sequence
from nanovllm.topics.decoding.drafts import Proposer, config_of
from nanovllm.topics.simulator.jobs import STOP, Job, Served

WRONG = -1  # a token that no answer has


def token_of(job: Job, i: int) -> int:
    """Output token i of the job's answer."""
    return STOP if i + 1 == job.num_outputs else job.answer


class Answers:
    """The answers of the simulated model: the jobs know them."""

    def __init__(self, served: dict[str, Served]):
        self.served = served

    def job_of(self, seq: Sequence) -> Job:
        return self.served[seq.request.request_id].job

    def drawn(self, schedule: Schedule) -> list[int]:
        """The next token of each row."""
        seqs = schedule.sampled
        return [token_of(self.job_of(seq), seq.num_output_tokens) for seq in seqs]

    def came(self, schedule: Schedule, now: float) -> None:
        """Notes the time of the accepted tokens: of the rows that are left after the step."""
        for seq in schedule.sampled:
            served = self.served[seq.request.request_id]
            served.token_times.append(now)


class JobProposer(Proposer):
    """Proposes as often, and as rightly, as `Job.right_draft_tokens` says."""

    def __init__(self, fields: dict[str, Any], answers: Answers):
        super().__init__(config_of(fields))
        self.answers = answers

    def propose(self, seq: Sequence, most: int) -> Tokens[int]:
        job = self.answers.job_of(seq)
        begin = seq.num_output_tokens
        num_right = -1
        if begin < len(job.right_draft_tokens):
            num_right = job.right_draft_tokens[begin]
        if num_right < 0:
            return []
        right = range(begin, begin + min(most, num_right))
        num_wrong = most - len(right)
        return [token_of(job, i) for i in right] + [WRONG] * num_wrong
