"""The session server: an OpenAI-compatible front of the policy that keeps every token of every conversation.

It owns sessions, their message graphs, open turns, request ids, work leases and sample assembly; what it knows is a
fold of the log. It never decides when to pause, never loads weights and never re-tokenises what an engine has said.
"""
