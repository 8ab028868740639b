"""The vocabulary that all processes of segue share: events, log, wire formats, folds, configuration, errors.

It never imports torch, ray or aiohttp, and never makes a decision.
"""
