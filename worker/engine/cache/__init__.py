"""The blocks in which computed tokens are cached.

`layout` has the kinds of groups that a model's layers form, and `block_pool` the blocks that all
groups share. `token_blocks` and `state_blocks` have the blocks that a sequence holds in one group,
and `alone` has the blocks of a sequence that has the cache to itself.
"""
