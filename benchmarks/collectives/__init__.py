"""All collectives by size, ranks and backend."""
