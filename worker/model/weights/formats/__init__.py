"""The formats of weights: a file for each, registered in `FORMATS`.

`interface` has the protocol `Format`, which finds out whether a checkpoint is stored like this, and
reads its matrices as a `worker.model.weights.weight.Weight`.
"""
