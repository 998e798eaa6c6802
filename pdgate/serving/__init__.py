"""Talking to what the deployment serves: requests with deadlines, their records, metrics and logs."""
