"""Several sequences of a request: parallel samples, beam search; and log-probabilities of the
prompt.
"""
