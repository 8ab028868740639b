"""A run told to people: the live display, one line per step, the summary and the reward plot.

It reads the log and writes to the terminal or to files; it never decides anything and appends nothing.
"""

from segue.progress.display import Display, open_display
from segue.progress.plot import plot_rewards
from segue.progress.summary import Extras, build_summary, write_summary
from segue.progress.view import RunView

__all__ = ["Display", "Extras", "RunView", "build_summary", "open_display", "plot_rewards", "write_summary"]
