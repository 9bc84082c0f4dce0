"""Name scopes by which parts of a step are recognised in its compiled program."""

SYNC_SCOPE = "jaxddp.sync"
METRICS_SCOPE = "jaxddp.metrics"
OPTIMIZER_SCOPE = "jaxddp.optimizer"
