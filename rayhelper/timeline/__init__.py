"""Where the time of a traced run went: ``rayhelper timeline trace.json [--html trace.html]``.

command.py     the subcommand
summary.py     busy and idle time a role and rank; the table
page.py        the HTML page, drawn by page.html
trace.py       the file; recording.py: which moments of a call become its spans
steps.py       marks of steps
"""

from rayhelper.timeline.command import timeline
from rayhelper.timeline.page import html
from rayhelper.timeline.summary import Method, Summary, Usage, summarise, union

__all__ = ["Method", "Summary", "Usage", "html", "summarise", "timeline", "union"]
