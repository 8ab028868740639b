"""megatron-core as segue uses it: process set-up, the model of four families, weight names. Never imports ray.

Nothing is re-exported here: importing this package must not import torch, so that callers choose when to pay for it.
"""
