"""Name scopes that mark parts of a step in its compiled program."""

SYNC_SCOPE = "jaxddp.sync"
METRICS_SCOPE = "jaxddp.metrics"
MODEL_STATE_SCOPE = "jaxddp.model_state"
LOSS_SCOPE = "jaxddp.loss"
OPTIMIZER_SCOPE = "jaxddp.optimizer"
OTHER_AXES_SCOPE = "jaxddp.other_axes"
