"""Reads the log of a run, live or ended, and shows it. It never writes and never starts an engine."""
