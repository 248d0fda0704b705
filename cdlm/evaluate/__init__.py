"""Measuring: the clock, the methods that are compared, and the report."""
