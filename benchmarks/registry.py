"""The benchmarks, by name."""

from .calibrate import BENCHMARK as CALIBRATE
from .collectives import BENCHMARK as COLLECTIVES
from .gates import BENCHMARK as GATES
from .ports.measure import BENCHMARK as PORTS
from .published import BENCHMARK as PUBLISHED
from .soak import BENCHMARK as SOAK
from .strategies import MAIN, STRATEGIES_BENCHMARK

ALL = (MAIN, STRATEGIES_BENCHMARK, COLLECTIVES, CALIBRATE, PUBLISHED, GATES, SOAK, PORTS)
BENCHMARKS = {one.name: one for one in ALL}
