"""Plans by formula, without JAX: buckets, costs, and the plan of a machine."""
