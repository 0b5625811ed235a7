"""FairShares: turns between clients, and a limit for what one of them holds while others wait."""

from collections import Counter

from nanovllm.schedule import Schedule
from nanovllm.scheduler import Scheduler
from nanovllm.sequence import Request


class FairShares(Scheduler):
    """Admits a request of the client that holds the least (chapter 16, "Turns"). A client alone may
    hold all. Once another one waits, each has a fair share: one of k clients has 1/k."""

    is_trusted = True
    favoured: Request | None = None  # a waiting request for which others were preempted

    def part(self, num_seqs: int, num_blocks: int) -> float:
        """The part of all seats (`max_num_seqs`) or of all blocks, whichever is larger."""
        all_blocks = len(self.block_manager.blocks)
        return max(num_seqs / self.max_num_seqs, num_blocks / all_blocks)

    def parts(self) -> dict[str, float]:
        """What each client holds. A block counts for each sequence that has it."""
        seats: Counter[str] = Counter()
        blocks: Counter[str] = Counter()
        for request in self.running:
            client = request.client
            seats[client] += request.most_sequences
            for seq in request.unfinished:
                blocks[client] += len(seq.block_table)
        return {client: self.part(seats[client], blocks[client]) for client in seats}

    def next_waiting(self) -> Request | None:
        if self.favoured in self.waiting:
            return self.favoured
        parts = self.parts()

        def turn(request: Request) -> tuple:
            part = parts.get(request.client, 0)
            return request.user_priority, part, request.arrival

        return min(self.waiting, key=turn, default=None)

    def victim(self, candidates: list[Request]) -> Request:
        """The last request of the client that holds the most."""
        parts = self.parts()

        def part(request: Request) -> float:
            return parts[request.client]

        return max(reversed(candidates), key=part)

    def make_room(self, schedule: Schedule) -> None:
        """Preempts requests of clients that hold more than their share, until the next waiting
        request fits, if its client then holds no more than a fair share."""
        self.favoured = None
        clients = {request.client for request in self.unfinished()}
        request = self.next_waiting()
        if request is None or len(clients) == 1:
            return
        fair = (1 - self.watermark) / len(clients)
        if self.part_with(request) > fair:
            return
        while not self._fits(request):
            running = sorted(self.running, key=self.running_order)
            victim = self.victim(running)
            is_urgent = victim.user_priority < request.user_priority
            if is_urgent or self.parts()[victim.client] <= fair:
                return
            self.preempt(victim)
            self.favoured = request

    def part_with(self, request: Request) -> float:
        """What the client of a waiting request holds once it runs."""
        num_tokens = len(request.prompt_token_ids)
        if not request.is_new:  # it has been preempted
            num_tokens = sum(map(len, request.unfinished))
        num_blocks = num_tokens // self.block_manager.block_size
        own = self.part(request.most_sequences, num_blocks)
        return own + self.parts().get(request.client, 0)
