"""Ray shells around engines and trainers: they carry out commands and report facts.

Importing this package imports neither ray nor torch: SGLang loads `actors.engines.sglang_cpu` from it in its own
processes. Nothing in here decides anything.
"""
