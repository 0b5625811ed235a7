"""FairShares: turns between clients, and a limit for what one of them holds while others wait."""

from collections import Counter

from nanovllm.schedule import Schedule
from nanovllm.scheduler import Scheduler
from nanovllm.sequence import Request


class FairShares(Scheduler):
    """Admits a request of the client that holds the least (chapter 16, "Turns"). A client alone may
    hold all. Once another one waits, each has a fair share: one of k clients has 1/k."""

    favoured: Request | None = None  # a waiting request for which others were preempted

    def part(self, num_seqs: int, num_blocks: int) -> float:
        """The part of all seats (`max_num_seqs`) or of all blocks, whichever is larger."""
        return max(num_seqs / self.max_num_seqs, num_blocks / len(self.block_manager.blocks))

    def parts(self) -> Counter[str]:
        """What each client holds. A block counts for each sequence that has it."""
        seats: Counter[str] = Counter()
        blocks: Counter[str] = Counter()
        for request in self.running:
            seats[request.client] += request.most_sequences
            blocks[request.client] += sum(len(seq.block_table) for seq in request.unfinished)
        return Counter({client: self.part(seats[client], blocks[client]) for client in seats})

    def next_waiting(self) -> Request | None:
        if self.favoured in self.waiting:
            return self.favoured
        parts = self.parts()

        def turn(request: Request) -> tuple:
            return request.user_priority, parts[request.client], request.arrival

        return min(self.waiting, key=turn, default=None)

    def victim(self, candidates: list[Request]) -> Request:
        """The last request of the client that holds the most."""
        parts = self.parts()
        return max(reversed(candidates), key=lambda request: parts[request.client])

    def make_room(self, schedule: Schedule) -> None:
        """Preempts requests of clients that hold more than their share, until the next waiting
        request fits, if its client then holds no more than a fair share."""
        self.favoured = None
        clients = {request.client for request in self.unfinished()}
        request = self.next_waiting()
        if request is None or len(clients) == 1:
            return
        fair = (1 - self.watermark) / len(clients)
        num_tokens = len(request.prompt_token_ids)
        if not request.is_new:  # it has been preempted
            num_tokens = sum(len(seq) for seq in request.unfinished)
        num_blocks = num_tokens // self.block_manager.block_size
        wanted = self.parts()[request.client] + self.part(request.most_sequences, num_blocks)
        while wanted <= fair and not self._fits(request):
            victim = self.victim(sorted(self.running, key=self.running_order))
            is_urgent = victim.user_priority < request.user_priority
            if is_urgent or self.parts()[victim.client] <= fair:
                return
            self.preempt(victim)
            self.favoured = request
