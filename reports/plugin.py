"""The report plugin."""
