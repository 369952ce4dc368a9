"""Drivers that advance schedule and memory step by step."""
