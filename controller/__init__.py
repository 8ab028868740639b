"""The controller turns facts into decisions: `decide` is pure, `loop` is its shell, `launch` composes the processes.

It never generates, trains or answers environments; only `launch` may import actors.
"""
