"""What every benchmark shares: options, ranks, runs, results, tables."""
