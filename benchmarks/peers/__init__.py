"""The library beside its peers: one cluster, one process, alternating blocks.

    sh benchmarks/peers.sh                  the tables                     (about ten minutes on two cores)
    sh benchmarks/peers.sh --quick          the same questions, small      (a minute or two)
    sh benchmarks/peers.sh --sizes          cost with the number of workers and of items; draws benchmarks/plots/

__main__.py      the command: asks the questions, prints the tables
questions.py     what is asked, and the answer that is right
measure.py       alternating blocks; the driver's memory
cluster.py       the cluster that all share; the machine and the versions
work.py          what a worker does; the same for all
by_hand.py       contestants: hand-written actors, naive and careful
ours.py          contestant: this library
ms_swift.py      contestant: ms-swift's RayHelper
verl_workers.py  contestant: verl's RayWorkerGroup
report.py        tables in Markdown
sizes.py         the other mode: growth, slopes and plots
counting.py      its workers
"""

import os

# Ray reads these when it is imported.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")  # a contestant that fails is in the table
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VERL_LOGGING_LEVEL", "ERROR")
