"""Ranks on this machine: fresh processes with a gloo group, forked from a warm server so that torch loads once.

Everything also runs under ``torchrun``: nothing in the library asks who started the ranks.

```
caller                            server (server.py)             rank (rank.py)
RankPool (pool.py)
  RankProcess (process.py) --fork--> torch is loaded  --fork-->  import main, join the group
       |  <------------- pid, exit code |                            |
       +---- jobs and answers (messages.py, job.py) -----------------+
```

The server lives as long as the caller, and no rank outlives the server.
"""

from ithaca.launch.pool import RankPool, run_ranks
from ithaca.launch.rank import join_group, threads_for

__all__ = ["RankPool", "join_group", "run_ranks", "threads_for"]
