"""Speculative decoding: draft, verify, accept and roll back inside one compiled loop, for a whole batch at once.

`acceptance` decides what stays of a proposal, `loop` is the compiled program, `ngram`, `model_draft` and `self_draft`
are the drafts, `policy` chooses how many tokens to draft, `batch` runs requests.
"""
