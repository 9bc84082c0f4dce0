"""How long a collective takes on which network, without a framework."""

from .curves import GB as GB, HLO_KINDS as HLO_KINDS, KINDS as KINDS, Network as Network, bus_factor as bus_factor
from .tables import from_file as from_file, measured as measured
