"""Assigns sessions to engines and serves plain clients as an ordinary proxy.

It knows engines and sessions from the log alone and decides by affinity, health, admitted weight version and load. It
is never a hop between a session server and an engine, and it never starts, pauses or updates an engine.
"""
