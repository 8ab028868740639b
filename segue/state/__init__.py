"""Pure folds of the log: what is true after N events. No I/O, no clock, no decisions."""

from segue.state.run import EngineState, GroupState, RunState

__all__ = ["EngineState", "GroupState", "RunState"]
