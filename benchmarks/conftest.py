"""Eight simulated devices for every test and example of this package."""

from jaxddp.mesh import simulate_devices

simulate_devices(8)
