"""The main job: every strategy in both frameworks."""
