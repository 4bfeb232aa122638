"""One page about a run, or about several side by side: ``report.html``, which needs no network.

recorded.py      a run as its folder tells it, with what is missing or damaged
completions.py   best, median and worst completions of the steps that kept them
charts.py        which curves there are, and each as SVG
page.py          the page: sections in order, everything escaped
command.py       ``rayhelper report RUN [RUN ...]``
"""
