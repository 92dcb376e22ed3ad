"""From logits to the next token: penalties, masks, cutoffs, draws and logprobs, row by row.

`sampler` draws, `row_scores` scores; the runner uses both.
"""
