"""Name scopes that mark parts of a step in its compiled program."""

SYNC_SCOPE = "jaxddp.sync"
METRICS_SCOPE = "jaxddp.metrics"
OPTIMIZER_SCOPE = "jaxddp.optimizer"
