"""How long a collective takes on which network, without a framework."""

from .curves import DEFAULT_LATENCY_US as DEFAULT_LATENCY_US
from .curves import GB as GB
from .curves import KINDS as KINDS
from .curves import Network as Network
from .curves import bus_factor as bus_factor
from .tables import from_file as from_file
from .tables import is_measured as is_measured
from .tables import measured as measured
