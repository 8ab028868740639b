"""What crosses process borders as bytes: frames of raw arrays, the training sample, route rows.

It never does I/O and never decides what is sent to whom.
"""
