"""Every benchmark in one run."""
