"""What tests of every package share: a clock moved by hand, events with sensible fields, logs to run against.

Shipped with the project so that users can test their own environments and handlers with it; production code never
imports it.
"""

from segue.testing.clock import ManualClock
from segue.testing.events import alarm, example

__all__ = ["ManualClock", "alarm", "example"]
