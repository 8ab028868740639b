"""What the benchmarks of the session server share: a canned engine, a load generator, contestants, reports."""
