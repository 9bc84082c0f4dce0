"""What a compiled program says: its operations, schedule, collectives and memory."""
