"""Strategies side by side, and beside what the frameworks do by themselves."""
