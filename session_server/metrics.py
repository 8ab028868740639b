"""Prometheus metrics of one session server."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class Metrics:
    """A registry of its own, so that several servers fit into one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.turns = Counter("segue_session_turns", "Turns by how they ended", ["outcome"], registry=self.registry)
        self.turn_s = Histogram(
            "segue_session_turn_seconds", "Request to answer", buckets=_SECONDS, registry=self.registry
        )
        self.tokens = Counter("segue_session_output_tokens", "Tokens committed", registry=self.registry)
        self.parts = Counter("segue_session_extra_parts", "Requests beyond a turn's first", registry=self.registry)
        self.retries = Counter("segue_session_retries", "Requests answered by an earlier turn", registry=self.registry)
        self.forwarded = Counter("segue_session_forwarded", "Requests for another server", registry=self.registry)
        self.leases = Counter("segue_session_leases", "Rollouts leased", registry=self.registry)
        self.sessions = Gauge("segue_session_open", "Sessions that are open", registry=self.registry)
        self.held = Gauge("segue_session_held_bytes", "Committed turns in memory", registry=self.registry)
        self.spilled = Gauge("segue_session_spilled_bytes", "Route rows out of memory", registry=self.registry)
        self.running = Gauge("segue_session_running_requests", "Requests at engines", registry=self.registry)

    def render(self) -> bytes:
        return generate_latest(self.registry)
