from nanovllm import RoundRobin


class MyRouter(RoundRobin):
    """To where the first token comes soonest. So far: one after the other."""

    def choose(self, request, loads):
        # TODO: `loads` says how many requests of each replica have not ended.
        # TODO: which replica has seen how much of `request.prompt_token_ids` before? Nobody tells
        # you: you have to remember what you have sent where. A replica has room for
        # `self.num_blocks` blocks of `self.block_size` tokens.
        return super().choose(request, loads)
