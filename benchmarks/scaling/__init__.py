"""Strong and weak scaling."""
